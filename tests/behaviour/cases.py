"""The runs whose behaviour is recorded: each a command of `lab`, as small as shows its subject."""

import torch
from torch import nn

COMMON = (
    "--threads 1 --precision fp32 --device cpu --batch-size 16 --max-steps 16 --eval-every 8 "
    "--test-rows 32"
)
RECALL = "--seq-len 32 --vocab-size 64 --n-heads 2"
RUNS = {
    "attention": f"mqar {RECALL} --d-model 32 --stack AM*2",
    "solved": f"mqar {RECALL} --d-model 32 --stack AM*2 --init oracle --no-history",
    "state space": f"mqar {RECALL} --d-model 16 --stack SN*4 --option S.d_state=8"
    " --option 0.S.position=rope --option 1.S.position=conv"
    " --option 2.S.position=decay --option 3.S.position=none --no-history",
    "cheems": f"mqar {RECALL} --d-model 16 --stack 'SE IE' --option S.d_state=8"
    " --option I.mask=soft --option E.n_experts=16 --option E.n_retrieval_heads=2 --option E.k=2",
    "masks": "mqar --seq-len 16 --vocab-size 64 --d-model 16 --stack AN*5"
    " --option A.window=8 --option A.max_seq_len=16"
    " --option 0.A.mask=literal --option 1.A.mask=straight-through"
    " --option 2.A.mask=soft --option 3.A.mask=value --option 4.A.mask=oracle --no-history",
    "experts": "memorize --seq-len 32 --vocab-size 64 --n-facts 32 --d-model 32 --stack 'AR AX AP'"
    " --option P.n_experts=16 --option P.n_retrieval_heads=2 --option P.k=2"
    " --optimizer adamw --schedule cosine --no-lengthen",
    "mixture": "mqar --seq-len 64 --n-pairs 2,4 --vocab-size 128 --d-model 16 --stack 'AM SM'"
    " --option S.d_state=8 --stage-steps 5 --unlearned lengthen --eval n_pairs=2,4,8 --no-history",
    "user's mixer": "bytes --seq-len 32 --d-model 16 --stack 'UM AM'"
    " --model tests.behaviour.cases:Average --path {text}",
}
"""By name. {text} is a file of text."""
TEXT = "\n".join(f"{n} and {n + 1} are {2 * n + 1}" for n in range(1000))


class Average(nn.Module):
    """A user's mixer: each position gets the mean of all positions up to it."""

    def __init__(self, d_model: int):
        super().__init__()
        self.value = nn.Linear(d_model, d_model)

    def forward(self, x):
        return self.value(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]

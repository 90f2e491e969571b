"""Models with product-key experts to test on: a random one, and one that holds planted facts."""

import torch

from analysis.experts.storage import find_retrieval_layers
from lab.models import LanguageModel, build
from tasks.base import Batch
from tasks.mqar import MQAR

TASK = MQAR(seq_len=16, n_pairs=4, vocab_size=32)
OPTIONS = {"P.n_experts": 12, "P.k": 2, "E.n_experts": 15, "E.k": 3, "E.n_retrieval_heads": 2}
N = 16
"""Facts, tokens, experts and channels of the planted model."""
FACTS = (torch.arange(N) * 5 + 3) % N
"""What each token is to be answered with."""


def small(
    stack: str = "AP AE", options: dict[str, object] | None = None
) -> tuple[LanguageModel, Batch]:
    own = {name: value for name, value in OPTIONS.items() if name[0] in stack}
    model = build(stack, vocab_size=32, d_model=16, options={**own, **(options or {})}, seed=1)
    return model.eval(), TASK.batch(split="test", size=5)


def memory() -> tuple[LanguageModel, Batch]:
    """Return a model in which expert e alone turns token e into its answer, and rows that ask.

    Token e is channel e; the queries' halves are its row and its column on the grid of 4 × 4.
    """
    options = {"P.n_experts": N, "P.n_retrieval_heads": 1, "P.k": 1, "P.d_retrieval": 8}
    model = build("NP", vocab_size=N, d_model=N, options=options, tied=False).eval()
    expert = find_retrieval_layers(model)[0]
    with torch.no_grad():
        for table in (model.embed.weight, model.head.weight, expert.down):
            table.copy_(torch.eye(N))
        model.head.weight.mul_(4)
        for key in (expert.row_keys, expert.column_keys):
            key.copy_(torch.eye(4))
        expert.query.weight.zero_()
        for token in range(N):
            expert.query.weight[token // 4, token] = expert.query.weight[4 + token % 4, token] = 1
            expert.up[token] = 2 * torch.eye(N)[FACTS[token]]
    tokens = torch.stack(
        [torch.randperm(N, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    )
    return model, Batch(tokens, FACTS[tokens], tokens % 2, {})

"""Models whose weights are set by hand, so that how they recall is known.

The residual stream holds a constant, a token, what layer 0 gathered and the answer, each token a
channel of its own. The head reads answers, of values alone.
"""

import math

import torch
from torch import Tensor, nn

from lab.layers.attention import Attention
from lab.layers.mixer import adapt
from lab.layers.ssd import SSD
from lab.models import Block, LanguageModel, build
from tasks.mqar import MQAR

VOCAB = 100
TASK = MQAR(seq_len=16, n_pairs=4, vocab_size=VOCAB, fillers="fresh")
"""Every slot is a query's; no filler is a decoy."""
LARGE = MQAR(seq_len=96, n_pairs=24, vocab_size=VOCAB, fillers="fresh")
WIDTH = 2 + 3 * VOCAB
UNIT = (WIDTH / 2) ** 0.5
"""What a norm makes of the constant, next to a token."""
CONSTANT = 0
TOKEN, GATHERED, ANSWER = (slice(1 + i * VOCAB, 1 + (i + 1) * VOCAB) for i in range(3))


class Matching(nn.Module):
    """Recalls in one step: M_ij = shifted · t_i·t_{j−1−n} + gathered · t_i·g_j, to the answer.

    t are tokens, one channel each, and g what was gathered before. The value of column j is
    t_{j−n}: with n > 0, `values` holds a convolution that moves it n positions later.
    """

    def __init__(self, shifted: float, gathered: float, later: int = 0):
        super().__init__()
        self.shifted, self.gathered, self.later = shifted, gathered, later

    def matrix(self, x: Tensor) -> Tensor:
        token = x[..., TOKEN]
        before = nn.functional.pad(token, (0, 0, 1 + self.later, 0))[:, : x.shape[1]]
        keys = self.shifted * before + self.gathered * x[..., GATHERED]
        return (token @ keys.mT).tril()[:, None]

    def values(self, x: Tensor) -> Tensor:
        moved = nn.functional.pad(x[..., TOKEN], (0, 0, self.later, 0))
        return moved[:, None, : x.shape[1]]

    def project(self, x: Tensor, z: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[..., ANSWER] = z[:, 0]
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x, self.matrix(x) @ self.values(x))


def blank(stack: str, options: dict[str, object] | None = None) -> LanguageModel:
    """Return a model whose embedding and head are set and whose mixers do nothing."""
    model = build(stack, vocab_size=VOCAB, d_model=WIDTH, tied=False, options=options).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.embed.weight.zero_()
    model.embed.weight[:, CONSTANT] = 1
    model.embed.weight[:, TOKEN] = torch.eye(VOCAB)
    model.head.weight.zero_()
    model.head.weight[VOCAB // 2 :, ANSWER] = torch.eye(VOCAB)[VOCAB // 2 :]
    for block in model.blocks:
        assert isinstance(block, Block)
        for name, parameter in block.named_parameters():
            if not name.startswith("norm"):
                parameter.zero_()
    return model


def mixer(model: LanguageModel, layer: int) -> nn.Module:
    """Return a block's mixer."""
    block = model.blocks[layer]
    assert isinstance(block, Block)
    assert block.mixer is not None
    return block.mixer


def replaced(model: LanguageModel, layer: int, by: nn.Module) -> LanguageModel:
    """Return the model with another mixer in a block."""
    block = model.blocks[layer]
    assert isinstance(block, Block)
    block.mixer = adapt(by)
    return model


def look_back(attention: nn.Module, offset: int, into: slice) -> None:
    """Let every position copy the token `offset` before it into other channels.

    Queries and keys are constant: score Σ_f cos θ_f (i − j − offset), by the rotation alone.
    """
    assert isinstance(attention, Attention)
    half = WIDTH // 2
    angle = offset * 10000.0 ** (-torch.arange(half) / half)
    attention.q.weight[:half, CONSTANT] = 2
    attention.k.weight[:half, CONSTANT] = 2 * angle.cos()
    attention.k.weight[half:, CONSTANT] = 2 * angle.sin()
    copy(attention, into)


def copy(attention: Attention, into: slice) -> None:
    """Let an attention's values be tokens, put out into other channels."""
    assert isinstance(attention.v, nn.Linear)
    attention.v.weight[TOKEN, TOKEN] = torch.eye(VOCAB)
    attention.out.weight[into, TOKEN] = torch.eye(VOCAB) / UNIT


def induction() -> LanguageModel:
    """Layer 0: a position gathers the token before it; layer 1: queries match what is gathered."""
    model = blank("AN AN", {"1.A.position": "none"})
    look_back(mixer(model, 0), 1, GATHERED)
    match = mixer(model, 1)
    assert isinstance(match, Attention)
    match.q.weight[TOKEN, TOKEN] = 2.5 * torch.eye(VOCAB)
    match.k.weight[TOKEN, GATHERED] = 2.5 * torch.eye(VOCAB)
    copy(match, ANSWER)
    return model


def ssd_induction() -> LanguageModel:
    """The same by SSDs: what is gathered fades by e³ a token; then C is the token, B that."""
    options: dict[str, object] = {"S.d_state": VOCAB, "S.dt_init": "paper", "S.skip": False}
    model = blank("SN SN", options | {"0.S.position": "decay", "1.S.position": "none"})
    gather, match = mixer(model, 0), mixer(model, 1)
    assert isinstance(gather, SSD)
    assert isinstance(match, SSD)
    assert gather.A_log is not None
    gather.A_log.fill_(math.log(3))
    gather.B_proj.weight[0, CONSTANT] = gather.C_proj.weight[0, CONSTANT] = 1 / UNIT
    match.C_proj.weight[:, TOKEN] = match.B_proj.weight[:, GATHERED] = torch.eye(VOCAB)
    for ssd, into in ((gather, GATHERED), (match, ANSWER)):
        # dt near 1, what a softplus of ln(e − 1) gives.
        ssd.dt_proj.weight[:, CONSTANT] = math.log(math.e - 1) / UNIT
        ssd.x_proj.weight[TOKEN, TOKEN] = torch.eye(VOCAB)
        ssd.out_proj.weight[into, TOKEN] = torch.eye(VOCAB) / UNIT
    return model


def positional() -> LanguageModel:
    """Slot i answers value i: T = 16 and K = 4 put them 7 tokens apart."""
    model = blank("AN AN")
    look_back(mixer(model, 1), 7, ANSWER)
    return model


def direct(stack: str = "AN AN", layer: int = 1) -> LanguageModel:
    """One layer reads each key beside its value, others do nothing."""
    return replaced(blank(stack), layer, Matching(shifted=1.0, gathered=0.0))


def late_direct(stack: str = "AN AN", layer: int = 1) -> LanguageModel:
    """`direct`, but a convolution puts each value two positions later."""
    return replaced(blank(stack), layer, Matching(shifted=1.0, gathered=0.0, later=2))


def late_induction() -> LanguageModel:
    """Keys are gathered two positions after their values, and both are read there."""
    model = blank("AN AN")
    look_back(mixer(model, 0), 3, GATHERED)
    return replaced(model, 1, Matching(shifted=0.0, gathered=1.0, later=2))


def mixed() -> LanguageModel:
    """Layer 1 matches what layer 0 gathered and reads keys itself, one as much as the other."""
    model = blank("AN AN")
    look_back(mixer(model, 0), 1, GATHERED)
    return replaced(model, 1, Matching(shifted=0.5, gathered=0.5))


def deep_induction() -> LanguageModel:
    """Induction over four blocks: gathered in block 1, matched in block 3."""
    model = blank("AN AN NN AN", {"3.A.position": "none"})
    shallow = induction()
    replaced(model, 1, mixer(shallow, 0))
    return replaced(model, 3, mixer(shallow, 1))


def untrained() -> LanguageModel:
    """Random weights."""
    return build("AM AM", vocab_size=VOCAB, d_model=16).eval()


def constant() -> LanguageModel:
    """Always the same value."""
    model = blank("AN AN")
    model.head.weight[VOCAB - 1, CONSTANT] = 1
    return model

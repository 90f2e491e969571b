"""The delta rule, forward and backward, against its token loop, state space duality and fla.

Keys have length 1 and β is in (0, 1), as in the layers. fla's plain forms are given several chunk
lengths. That all compute the same numbers is held by
`tests/parity/test_delta.py` and `tests/unit/ops/test_delta.py`.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.bench.ratio import Contest, Ratio
from lab.ops.delta import delta, delta_loop
from lab.ops.ssd import ssd
from lab.peers import load

ROWS, SEQ_LEN, HEADS, HEAD_DIM, STATE = (1, 8), 2048, 4, 64, 64
CHUNK_LENS = (32, 64)
"""Chunk lengths of fla's forms; the promise is about each form at its best length."""
AGAINST_SSD, AGAINST_LOOP, AGAINST_FLA = 1 / 2.5, 3.0, 1.0

Form = Callable[..., Tensor]
"""(q, k, v, beta, log_decay) → o, the log-decay for a head or for its key channels."""


def measure() -> Iterator[Ratio]:
    """Measure the gated delta rule against what it generalises, and each case against fla's."""
    for rows in ROWS:
        size = f"{rows} rows, T={SEQ_LEN}, {HEADS} heads, state {STATE}"
        ours = partial(_prepare, _gated, rows)
        theirs = partial(_prepare, _ssd, rows)
        name = f"gated delta rule against state space duality, {size}"
        yield from Contest(name, ours, theirs, AGAINST_SSD).measure()
        theirs = partial(_prepare, _ssd, rows)
        name = f"state space duality as a case of the delta rule against its own op, {size}"
        yield from Contest(name, partial(_prepare, _dual, rows), theirs).measure()
        if rows == 1:  # The loop keeps a state for each token.
            theirs = partial(_prepare, _loop, rows)
            name = f"gated delta rule against its token loop, {size}"
            yield from Contest(name, ours, theirs, AGAINST_LOOP).measure(3)
        for name, (mine, form, channel) in FLA.items():
            if channel and rows > 1:  # fla's would take ten minutes.
                continue
            ours = partial(_prepare, mine, rows, channel)
            for chunk_len in CHUNK_LENS:
                theirs = partial(_prepare, partial(form, chunk_len=chunk_len), rows, channel)
                name_of_pair = f"{name}: fla's naive, chunks of {chunk_len}, {size}"
                yield from Contest(name_of_pair, ours, theirs, AGAINST_FLA).measure(3)


def _gated(q, k, v, beta, log_decay):
    return delta(q, beta[..., None] * k, v, log_decay, match=k)[0]


def _ungated(q, k, v, beta, log_decay):
    return delta(q, beta[..., None] * k, v, match=k)[0] + 0 * log_decay[..., None]


def _additive(q, k, v, beta, log_decay):
    return delta(q, k, v, log_decay)[0] + 0 * beta[..., None]


def _dual(q, k, v, beta, log_decay):
    return _additive(q, k, -log_decay[..., None] * v, beta, log_decay)


def _loop(q, k, v, beta, log_decay):
    return delta_loop(q, beta[..., None] * k, v, log_decay, match=k)[0]


def _ssd(q, k, v, beta, log_decay):
    A = -torch.ones(q.shape[2])
    return ssd(v, -log_decay, A, k, q)[0] + 0 * beta[..., None]


def _fla_gated(q, k, v, beta, log_decay, chunk_len):
    form = load("fla.ops.gated_delta_rule.naive").naive_chunk_gated_delta_rule
    return form(q, k, v, log_decay, beta, chunk_len, scale=1.0)[0]


def _fla_ungated(q, k, v, beta, log_decay, chunk_len):
    form = load("fla.ops.delta_rule.naive").delta_rule_chunkwise
    # It scales q by n^{−½} without being asked.
    given = (z.transpose(1, 2) for z in (q.shape[-1] ** 0.5 * q, k, v, beta))
    return form(*given, chunk_size=chunk_len)[0].transpose(1, 2) + 0 * log_decay[..., None]


def _fla_kda(q, k, v, beta, log_decay, chunk_len):
    form = load("fla.ops.kda.naive").naive_chunk_kda
    return form(q, k, v, log_decay, beta, scale=1.0, chunk_size=chunk_len)[0]


def _fla_additive(q, k, v, beta, log_decay, chunk_len):
    form = load("fla.ops.simple_gla.naive").naive_chunk_simple_gla
    return form(q, k, v, log_decay, scale=1.0, chunk_size=chunk_len)[0] + 0 * beta[..., None]


FLA: dict[str, tuple[Form, Form, bool]] = {
    "gated delta rule": (_gated, _fla_gated, False),
    "delta rule": (_ungated, _fla_ungated, False),
    "KDA": (_gated, _fla_kda, True),
    "scalar decay, nothing erased": (_additive, _fla_additive, False),
}
"""By case: our form, fla's, and whether each key channel has a decay. fla's GLA is a token loop."""


def _prepare(form: Form, rows: int, channel: bool = False) -> Callable[[], object]:
    """Prepare a call of forward and backward."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, SEQ_LEN, HEADS, *shape, generator=generator)

    q, k, v = normal(STATE), F.normalize(normal(STATE), dim=-1), normal(HEAD_DIM)
    beta, log_decay = normal().sigmoid(), -0.05 * normal(*[STATE] * channel).sigmoid()
    leaves = [z.requires_grad_() for z in (q, k, v, beta, log_decay)]
    weights = torch.ones_like(v)
    return lambda: torch.autograd.grad(form(*leaves), leaves, weights)

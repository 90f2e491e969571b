"""The delta rule, forward and backward: chunks against the loop, SSD, and a public torch form.

SSD is a delta rule without correction, so it bounds what one can take; it gets as many groups as
heads, as the delta rule's heads do not share keys. That the loop and the public form compute the
same numbers is held by `tests/property/test_delta.py` and `tests/parity/test_delta.py`.
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

ROWS, SEQ_LEN, HEADS, HEAD_DIM, STATE = 1, 2048, 4, 64, 64
CHUNK_LENS = (32, 64)
"""Chunk lengths of the lab's op, and of fla's."""

Form = Callable[..., Tensor]
"""(q, k, v, log_decay, beta, chunk_len) → y; keys of unit length, no scale."""


def measure() -> Iterator[Ratio]:
    """Time the lab's gated delta rule, at each chunk length, against each other form."""
    for name, promised in TARGETS.items():
        for chunk_len in CHUNK_LENS:
            what = f"gated delta rule, T={SEQ_LEN}, {HEADS} heads, chunks of {chunk_len}: {name}"
            ours, theirs = (partial(_prepare, form, chunk_len) for form in ("lab", name))
            yield from Contest(what, ours, theirs, promised).measure()


def _lab(q, k, v, log_decay, beta, chunk_len):
    return delta(q, beta[..., None] * k, v, log_decay, match=k, chunk_len=chunk_len)[0]


def _loop(q, k, v, log_decay, beta, chunk_len):
    return delta_loop(q, beta[..., None] * k, v, log_decay, match=k)[0]


def _ssd(q, k, v, log_decay, beta, chunk_len):
    """State space duality of the same shape, by the lab's own choice of chunks; dt is β."""
    return ssd(v, beta, -torch.ones_like(beta[0, 0]), k, q, backend="torch")[0]


def _fla(q, k, v, log_decay, beta, chunk_len):
    form = load("fla.ops.gated_delta_rule.naive").naive_chunk_gated_delta_rule
    return form(q, k, v, log_decay, beta, chunk_size=chunk_len, scale=1.0)[0]


FORMS: dict[str, Form] = {"lab": _lab, "its loop": _loop, "SSD": _ssd, "fla's naive": _fla}
TARGETS = {"its loop": 3.0, "SSD": 1 / 2.5, "fla's naive": 1.0}
"""The other forms, and how many times as fast as each the chunks are promised to be."""


def _prepare(name: str, chunk_len: int) -> Callable[[], object]:
    """Prepare a call of forward and backward, after a first one that loads what it needs."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(ROWS, SEQ_LEN, HEADS, *shape, generator=generator)

    q, k = (F.normalize(normal(STATE), dim=-1) for _ in range(2))
    made = (q, k, normal(HEAD_DIM), -0.1 * normal().sigmoid(), normal().sigmoid())
    leaves = [z.requires_grad_() for z in made]

    def run(span: slice) -> tuple[Tensor | None, ...]:
        y = FORMS[name](*(z[:, span] for z in leaves), chunk_len)
        return torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=name == "SSD")

    run(slice(CHUNK_LENS[0]))
    return lambda: run(slice(None))

"""State space duality, forward and backward: the lab's torch backend against public torch forms.

Where heads share a group, a form without groups gets B and C in its fastest layout: mamba-ssm's
minimal form gets the one copy of a single group, which its einsums broadcast, the others a copy for
each head. That the forms compute the same numbers is held by `tests/parity/test_ssd.py`.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from lab.bench.ratio import Contest, Ratio
from lab.ops.ssd import ssd as lab_ssd
from lab.ops.ssd_forms import repeat_groups
from lab.peers import load

ROWS, SEQ_LEN, HEADS, HEAD_DIM, STATE = 4, 2048, 4, 64, 128
GROUPS = (1, 4)
CHUNK_LENS = (32, 64, 128)
"""Chunk lengths of the public forms; the promise is about the best form at its best length."""
TARGET = 2.0

Form = Callable[..., Tensor]
"""(x, dt, A, B, C, chunk_len) → y."""


def measure() -> Iterator[Ratio]:
    """Measure time and peak memory against each public form at each chunk length."""
    for g in GROUPS:
        ours = partial(_prepare, "lab", 256, g)
        for name in FORMS:
            for chunk_len in CHUNK_LENS:
                what = f"SSD, T={SEQ_LEN}, {HEADS} heads, {g} groups: {name}, chunks of {chunk_len}"
                theirs = partial(_prepare, name, chunk_len, g)
                yield from Contest(what, ours, theirs, TARGET, TARGET).measure()


def _lab(x, dt, A, B, C, chunk_len):
    return lab_ssd(x, dt, A, B, C, chunk_len=chunk_len, backend="torch")[0]


def _minimal(x, dt, A, B, C, chunk_len):
    form = load("mamba_ssm.modules.ssd_minimal").ssd_minimal_discrete
    if B.shape[2] > 1:
        B, C = (repeat_groups(z, x.shape[2]) for z in (B, C))
    return form(x * dt[..., None], dt * A, B, C, chunk_len)[0]


def _reference(x, dt, A, B, C, chunk_len):
    form = load("mamba_ssm.ops.triton.ssd_combined").ssd_chunk_scan_combined_ref
    return form(x, dt, A, B, C, chunk_len)


def _gla(x, dt, A, B, C, chunk_len):
    form = load("fla.ops.simple_gla.naive").naive_chunk_simple_gla
    B, C = (repeat_groups(z, x.shape[2]) for z in (B, C))
    return form(C, B, x * dt[..., None], dt * A, scale=1.0, chunk_size=chunk_len)[0]


def _mamba2_scan(x, dt, A, B, C, chunk_len):
    form = load("transformers.models.mamba2.modeling_mamba2").mamba2_chunk_scan
    return form(x, dt, A, B, C, chunk_len)


FORMS: dict[str, Form] = {
    "mamba-ssm's minimal": _minimal,
    "mamba-ssm's reference": _reference,
    "fla's naive": _gla,
    "transformers' slow path": _mamba2_scan,
}


def _prepare(name: str, chunk_len: int, g: int) -> Callable[[], object]:
    """Prepare a call of forward and backward.

    Decays are so weak that the whole sequence forgets no more than e^−60: mamba-ssm's reference
    takes exp before it masks, and beyond e^88 its gradient is NaN.
    """
    form = {**FORMS, "lab": _lab}[name]
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x = normal(ROWS, SEQ_LEN, HEADS, HEAD_DIM)
    dt = 0.02 * normal(ROWS, SEQ_LEN, HEADS).sigmoid()
    A = -1 - 2 * normal(HEADS).sigmoid()
    B, C = (normal(ROWS, SEQ_LEN, g, STATE) for _ in range(2))
    leaves = [z.requires_grad_() for z in (x, dt, A, B, C)]
    weights = torch.ones_like(x)

    def call() -> object:
        return torch.autograd.grad(form(*leaves, chunk_len), leaves, weights)

    # A first call, so that imports and set-up are not counted.
    first = slice(CHUNK_LENS[0])
    form(x[:, first], dt[:, first], A, B[:, first], C[:, first], CHUNK_LENS[0])
    return call

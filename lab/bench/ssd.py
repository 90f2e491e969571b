"""State space duality, forward and backward: the lab's torch backend against public torch forms.

Each public form is timed at its best chunk length. Where heads share a group, a form without groups
gets B and C in its fastest layout: mamba-ssm's minimal form gets the one copy of a single group,
which its einsums broadcast, the others a copy for each head.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lab.bench.peak import measure_peak_mib
from lab.bench.products import count_flops, record_products, time_products
from lab.bench.ratio import Ratio, time_in_turns
from lab.ops.ssd import ssd as lab_ssd
from lab.ops.ssd_forms import repeat_groups
from lab.peers import load

ROWS, SEQ_LEN, HEADS, HEAD_DIM, STATE = 4, 2048, 4, 64, 128
GROUPS = (1, 4)
CHUNK_LENS = (32, 64, 128)
TIME_TARGET = MEMORY_TARGET = 2.0
TOLERANCE = 1e-4
"""Largest difference allowed, of the largest entry: fp32 sums of thousands of terms."""

Form = Callable[..., Tensor]
"""(x, dt, A, B, C, chunk_len) → y."""


def measure() -> list[Ratio]:
    """Measure time and peak memory; the promise is about the fastest public form."""
    ratios = []
    for g in GROUPS:
        where = f"SSD, T={SEQ_LEN}, {HEADS} heads, {g} groups"
        theirs = {name: _choose_chunk_len(name, g) for name in FORMS}
        for name, chunk_len in theirs.items():
            _check_numbers(name, chunk_len, g)
        times = {
            name: time_in_turns(_prepare("lab", 256, g), _prepare(name, chunk_len, g))
            for name, chunk_len in theirs.items()
        }
        fastest = max(times, key=lambda name: times[name][0] / times[name][1])
        ours_peak = measure_peak_mib(partial(_prepare, "lab", 256, g))
        for name, (ours, usual) in times.items():
            promised = name == fastest
            note = f"chunks of {theirs[name]}" + (", the fastest" if promised else "")
            what = f"{where}: {name}"
            target = TIME_TARGET if promised else None
            ratios.append(Ratio.of_costs(what, 1e3 * ours, 1e3 * usual, "ms", target, note))
            peak = measure_peak_mib(partial(_prepare, name, theirs[name], g))
            target = MEMORY_TARGET if promised else None
            memory = f"{what}, memory"
            ratios.append(Ratio.of_costs(memory, ours_peak, peak, "MiB", target, note))
        ratios.append(_compare_products(where, g, *times[fastest]))
    return ratios


def _compare_products(where: str, g: int, ours: float, fastest: float) -> Ratio:
    """Compare the lab's seconds with those of its matrix products alone, which bound them."""
    products = record_products(_prepare("lab", 256, g))
    alone = time_products(products)
    note = (
        f"{count_flops(products) / alone / 1e9:.0f} GFLOP/s; "
        f"{fastest / alone:.3g} × would be reached if all else were free"
    )
    name = f"{where}: the lab's, against its matrix products alone"
    return Ratio.of_costs(name, 1e3 * ours, 1e3 * alone, "ms", None, note)


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


def _draw_problem(g: int) -> list[Tensor]:
    """Return x, dt, A, B, C of decays so weak that the whole sequence forgets no more than e^−60.

    mamba-ssm's reference takes exp before it masks, between chunks too: beyond e^88 its gradient
    is NaN, as it is for Mamba-2's own start.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x = normal(ROWS, SEQ_LEN, HEADS, HEAD_DIM)
    dt = 0.02 * normal(ROWS, SEQ_LEN, HEADS).sigmoid()
    A = -1 - 2 * normal(HEADS).sigmoid()
    B, C = (normal(ROWS, SEQ_LEN, g, STATE) for _ in range(2))
    return [z.requires_grad_() for z in (x, dt, A, B, C)]


def _prepare(name: str, chunk_len: int, g: int) -> Callable[[], list[Tensor]]:
    """Prepare a call of forward and backward that returns y and the gradients of x, dt, A, B, C."""
    forms: dict[str, Form] = {**FORMS, "lab": _lab}
    form = forms[name]
    leaves = _draw_problem(g)
    weights = torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(1))

    def call() -> list[Tensor]:
        y = form(*leaves, chunk_len)
        return [y.detach(), *torch.autograd.grad(y, leaves, weights)]

    # A first call, so that imports and set-up are not counted.
    x, dt, A, B, C = leaves
    first = slice(CHUNK_LENS[0])
    form(x[:, first], dt[:, first], A, B[:, first], C[:, first], CHUNK_LENS[0])
    return call


def _choose_chunk_len(name: str, g: int) -> int:
    """Return the chunk length at which a form is fastest, each timed in turns with the lab's."""
    ours = _prepare("lab", 256, g)

    def ratio(chunk_len: int) -> float:
        mine, theirs = time_in_turns(ours, _prepare(name, chunk_len, g))
        return theirs / mine

    return min(CHUNK_LENS, key=ratio)


def _check_numbers(name: str, chunk_len: int, g: int) -> None:
    """Check that a form computes the same numbers as the lab; else its speed means nothing."""
    ours, theirs = _prepare("lab", 256, g)(), _prepare(name, chunk_len, g)()
    for what, mine, other in zip(("y", "x", "dt", "A", "B", "C"), ours, theirs, strict=True):
        error = ((mine - other).abs().max() / other.abs().max()).item()
        assert error <= TOLERANCE, f"{name}: {what} is off by {error:.1e} of its largest"

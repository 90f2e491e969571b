"""Mamba-2's whole mixer, forward and backward: ours against transformers' slow path, same weights.

transformers computes state space duality inside its mixer only, so the projections, the
convolution and the gated norm are timed with it, on both sides.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lab.bench.peak import peak_mib
from lab.bench.ratio import Ratio, seconds_each
from lab.layers.ssd import SSD
from lab.peers import load

ROWS, SEQ_LEN, D_MODEL, HEADS, HEAD_DIM, STATE = 4, 2048, 128, 4, 64, 128
CHUNK_LENS = (64, 128, 256)
TOLERANCE = 1e-4
"""Largest difference allowed, of the largest entry: fp32 sums of thousands of terms."""


def mixer() -> list[Ratio]:
    """Measure time and peak memory against transformers' mixer at its best chunk length."""
    ours = _prepare("lab", 256)
    times = {c: seconds_each(ours, _prepare("transformers", c)) for c in CHUNK_LENS}
    best = max(times, key=lambda c: times[c][0] / times[c][1])
    for mine, other in zip(ours(), _prepare("transformers", best)(), strict=True):
        assert (mine - other).abs().max() <= TOLERANCE * other.abs().max()
    where = f"Mamba-2's mixer, T={SEQ_LEN}, d {D_MODEL}, {HEADS} heads: transformers' slow path"
    note = f"chunks of {best}"
    mine, other = times[best]
    our_peak = peak_mib(partial(_prepare, "lab", 256))
    their_peak = peak_mib(partial(_prepare, "transformers", best))
    less = their_peak / our_peak
    return [
        Ratio(where, 1e3 * mine, 1e3 * other, "ms", other / mine, None, note),
        Ratio(f"{where}, memory", our_peak, their_peak, "MiB", less, None, note),
    ]


def mamba2_weights(theirs: nn.Module, ours: SSD) -> dict[str, Tensor]:
    """Return the weights of a transformers Mamba2Mixer by the names of our layer of its sizes.

    One projection of theirs makes gate, x, B, C and dt, side by side.
    """
    widths = [
        linear.out_features
        for linear in (ours.x_proj, ours.x_proj, ours.B_proj, ours.C_proj, ours.dt_proj)
    ]
    parts = theirs.get_parameter("in_proj.weight").split(widths)
    weights = {
        f"{name}_proj.weight": part
        for name, part in zip(("z", "x", "B", "C", "dt"), parts, strict=True)
    }
    same = {
        "dt_proj.bias": "dt_bias",
        "A_log": "A_log",
        "D": "D",
        "conv.bias": "conv1d.bias",
        "norm_weight": "norm.weight",
        "out_proj.weight": "out_proj.weight",
    }
    weights |= {name: theirs.get_parameter(their) for name, their in same.items()}
    return weights | {"conv.weight": theirs.get_parameter("conv1d.weight").squeeze(1)}


def _prepare(who: str, chunk_len: int) -> Callable[[], list[Tensor]]:
    """Return a call of forward and backward: y, and the gradients of x and of two weights."""
    configuration = load("transformers.models.mamba2.configuration_mamba2").Mamba2Config(
        hidden_size=D_MODEL,
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        state_size=STATE,
        n_groups=1,
        chunk_size=chunk_len,
        num_hidden_layers=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = load("transformers.models.mamba2.modeling_mamba2").Mamba2Mixer(configuration, 0)
        x = torch.randn(ROWS, SEQ_LEN, D_MODEL, requires_grad=True)
        weights = torch.randn(ROWS, SEQ_LEN, D_MODEL)
        ours = SSD(
            D_MODEL,
            HEADS,
            d_state=STATE,
            d_inner=HEADS * HEAD_DIM,
            chunk_len=chunk_len,
            position="conv",
            gate="norm",
            backend="torch",
        )
    ours.load_state_dict(mamba2_weights(theirs, ours))
    module: nn.Module = ours if who == "lab" else theirs
    leaves = [x, *(module.get_parameter(name) for name in ("out_proj.weight", "D"))]

    def call() -> list[Tensor]:
        y = module(x)
        return [y.detach(), *torch.autograd.grad(y, leaves, weights)]

    with torch.no_grad():
        module(x[:, :chunk_len])
    return call

"""The vectors that rotary mixers compare, and means of their products by frequency and by lag.

Queries are compared with keys, C with B. Before rotation, pair m of channels is a complex number,
q on the target's side and k on the source's:

    score_ts = scale · Σ_m Re(q̄_tm k_sm e^{−i(t−s)θ_m})
             = scale · Σ_m [(q_m·k_m) cos((t−s)θ_m) + (q_m×k_m) sin((t−s)θ_m)]

with q·k = q₁k₁ + q₂k₂ and q×k = q₁k₂ − q₂k₁. Axis letters beside the package's: m pair of channels,
which is one frequency; c comparison (a query head of attention, a group of SSD); l lag t − s.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from lab.hooks import HookPoint
from lab.layers.mixer import RotaryPairs, get_rotary_pairs
from lab.models import LanguageModel
from lab.models.evaluation import score
from lab.ops.rope import Layout
from tasks.base import Batch

BLOCK_ENTRIES = 2**20
"""Entries of q that are compared at once: larger blocks do not fit the processor's cache."""
Found = TypeVar("Found")


@dataclass(frozen=True)
class RotatedSides:
    """The two sides that a mixer compares, before they are rotated.

    Attributes:
        layer: index of the block.
        sides: "Q/K" of attention, "C/B" of SSD.
        q: targets, queries or C.
        k: sources, keys or B; one for each comparison.
        theta: rotation angle per token, in (0, 1].
        scale: 1/√p of attention's head width p; 1 of SSD.
        groups: the comparison that each head uses.
        log_decay: of SSD, ≤ 0; None for attention.
    """

    layer: int
    sides: str
    q: Complex[Tensor, "b t c m"]
    k: Complex[Tensor, "b t c m"]
    theta: Float[np.ndarray, " m"]
    scale: float
    groups: Int[np.ndarray, " h"]
    log_decay: Float[Tensor, "b t h"] | None

    def turn(self, lags: Int[Tensor, " l"]) -> Complex[Tensor, "l m"]:
        """Return scale · e^{−i lag θ}, the factor of a product q̄k at that lag."""
        angles = lags[:, None].double() * torch.from_numpy(self.theta).to(lags.device)
        return torch.polar(torch.full_like(angles, self.scale), -angles).to(self.q.dtype)

    def blocks(self) -> Iterator[slice]:
        """Yield the rows of the batch, a few at a time."""
        height = max(1, BLOCK_ENTRIES // self.q[0].numel())
        for first in range(0, len(self.q), height):
            yield slice(first, first + height)


@torch.no_grad()
def measure_rotated_sides(
    model: LanguageModel, batch: Batch, measure: Callable[[RotatedSides], Found]
) -> list[Found]:
    """Return what `measure` returns for every rotary mixer, in the order of the layers.

    Only one layer's tensors are kept at a time. Hooks that are in place take effect.
    """
    found: list[Found] = []
    rotated = find_rotary_pairs(model)
    seen: dict[str, Tensor] = {}

    def keep(tensor: Tensor, point: HookPoint) -> None:
        layer, _, name = point.name.removeprefix("blocks.").partition(".mixer.")
        seen[name] = tensor
        pairs = rotated[int(layer)]
        if len(seen) == len(list_hooks(pairs)):
            found.append(measure(_read_sides(int(layer), pairs, seen)))
            seen.clear()

    points = [
        f"blocks.{layer}.mixer.{name}"
        for layer, pairs in rotated.items()
        for name in list_hooks(pairs)
    ]
    if points:
        with model.hooks([(points, keep)]):
            score(model, batch, "fp32")
    return found


def find_rotary_pairs(model: LanguageModel) -> dict[int, RotaryPairs]:
    """Return how mixers rotate what they compare, by layer; those that do not are left out."""
    mixers = (getattr(block, "mixer", None) for block in model.blocks)
    found = enumerate(map(get_rotary_pairs, mixers))
    return {layer: pairs for layer, pairs in found if pairs is not None}


def list_hooks(pairs: RotaryPairs) -> list[str]:
    """Return the hook points that a rotation's two sides pass, and its log-decay if it has one."""
    names = (pairs.target_hook, pairs.source_hook, pairs.decay_hook)
    return [name for name in names if name is not None]


def pair_channels(x: Float[Tensor, "b t h n"], layout: Layout) -> Complex[Tensor, "b t h m"]:
    """Return each pair of channels that rotates together as one complex number."""
    shape, axis = ((2, -1), -2) if layout == "half" else ((-1, 2), -1)
    return torch.complex(*x.unflatten(-1, shape).unbind(axis))


def average_causal_pairs(
    sides: RotatedSides,
) -> tuple[Float[np.ndarray, "c m"], Complex[np.ndarray, "c m"]]:
    """Return the means of |q||k| and of q̄k over all pairs of a target and a source ≤ it."""
    size, product = 0.0, 0.0
    for rows in sides.blocks():
        q, k = sides.q[rows], sides.k[rows]
        size = size + (q.abs() * k.abs().cumsum(1)).sum((0, 1), dtype=torch.float64)
        product = product + (q.conj() * k.cumsum(1)).sum((0, 1), dtype=torch.complex128)
    assert isinstance(size, Tensor)
    assert isinstance(product, Tensor)
    b, t = sides.q.shape[:2]
    count = b * t * (t + 1) / 2
    return (size / count).cpu().numpy(), (product / count).cpu().numpy()


def average_by_lag(
    sides: RotatedSides, lags: Int[np.ndarray, " l"]
) -> tuple[Float[np.ndarray, "l c m"], Float[np.ndarray, "l h"], Float[np.ndarray, "l h"]]:
    """Return means over all pairs of tokens at each lag.

    Args:
        sides: the sides of a layer.
        lags: each in 0 … t − 1.

    Returns:
        what each frequency adds to the score, which is the sum over m; the decay exp Σ a between
        source and target, 1 for attention; and the score times the decay.
    """
    device, seq_len = sides.q.device, sides.q.shape[1]
    turns = sides.turn(torch.from_numpy(lags).to(device))
    groups = torch.from_numpy(sides.groups).to(device)
    parts = torch.zeros(len(lags), *sides.q.shape[2:], dtype=torch.float64, device=device)
    decays = torch.zeros(len(lags), len(groups), dtype=torch.float64, device=device)
    decayed = torch.zeros_like(decays)
    for rows in sides.blocks():
        q, k = sides.q[rows].conj(), sides.k[rows]
        total = None if sides.log_decay is None else sides.log_decay[rows].double().cumsum(1)
        for i, lag in enumerate(lags.tolist()):
            added = (q[:, lag:] * k[:, : seq_len - lag] * turns[i]).real
            parts[i] += added.sum((0, 1), dtype=torch.float64)
            if total is not None:
                decay = (total[:, lag:] - total[:, : seq_len - lag]).exp()
                decays[i] += decay.sum((0, 1))
                decayed[i] += (added.sum(-1)[..., groups] * decay).sum((0, 1))
    count = len(sides.q) * (seq_len - torch.from_numpy(lags).to(device))[:, None]
    parts = parts / count[..., None]
    if sides.log_decay is None:
        decays, decayed = torch.ones_like(decays), parts.sum(-1)[:, groups]
    else:
        decays, decayed = decays / count, decayed / count
    return parts.cpu().numpy(), decays.cpu().numpy(), decayed.cpu().numpy()


def _read_sides(layer: int, pairs: RotaryPairs, seen: dict[str, Tensor]) -> RotatedSides:
    """Return what passed a mixer's hooks; every comparison gets its own source."""
    targets, sources = seen[pairs.target_hook], seen[pairs.source_hook]
    q = pair_channels(targets.float() if targets.itemsize < 4 else targets, pairs.layout)
    k = pair_channels(sources.to(q.real.dtype), pairs.layout)
    if pairs.source_of != tuple(range(k.shape[2])):
        k = k[:, :, list(pairs.source_of)]
    return RotatedSides(
        layer=layer,
        sides=pairs.sides,
        q=q,
        k=k,
        theta=pairs.base ** -(np.arange(pairs.n_pairs) / pairs.n_pairs),
        scale=pairs.scale,
        groups=np.array(pairs.comparison_of),
        log_decay=None if pairs.decay_hook is None else seen[pairs.decay_hook],
    )

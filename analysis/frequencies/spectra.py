"""What rotated mixers compare, frequency by frequency: queries with keys, C with B.

Pair m of a query and of a key is a complex number each, q and k, before the rotation turns them:

    score_ts = scale · Σ_m Re(q̄_tm k_sm e^{−i(t−s)θ_m})
             = scale · Σ_m [(q_m·k_m) cos((t−s)θ_m) + (q_m×k_m) sin((t−s)θ_m)]

with q·k = q₁k₁ + q₂k₂ and q×k = q₁k₂ − q₂k₁. Axis letters beside the package's: m pair of channels,
c comparison (a query head of attention, a group of SSD), l lag t − s, e edge (row, t, s).
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
"""Pairs of channels that are compared at once: larger ones leave the processor's cache."""
Found = TypeVar("Found")


@dataclass(frozen=True)
class Rotation:
    """What a rotated mixer compares, before it is rotated.

    Attributes:
        layer: index of the block.
        sides: "Q/K" of attention, "C/B" of SSD.
        q: what reads, queries or C.
        k: what is read, keys or B.
        theta: angle a token, in (0, 1].
        scale: 1/√p of attention's head width p; 1 of SSD.
        groups: by which comparison each head goes.
        log_decay: SSD's, ≤ 0; None for attention.
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
        """Return scale · e^{−i lag θ}, what a product q̄k at that lag is multiplied by."""
        angles = lags[:, None].double() * torch.from_numpy(self.theta).to(lags.device)
        return torch.polar(torch.full_like(angles, self.scale), -angles).to(self.q.dtype)

    def blocks(self) -> Iterator[slice]:
        """Yield the rows of the batch, a few at a time."""
        height = max(1, BLOCK_ENTRIES // self.q[0].numel())
        for first in range(0, len(self.q), height):
            yield slice(first, first + height)


@dataclass(frozen=True)
class Edges:
    """Pairs of a target and an earlier source.

    Attributes:
        rows: row of the batch.
        targets: position that reads.
        sources: position that is read, ≤ target.
    """

    rows: Int[Tensor, " e"]
    targets: Int[Tensor, " e"]
    sources: Int[Tensor, " e"]

    @property
    def lags(self) -> Int[Tensor, " e"]:
        """Target less source."""
        return self.targets - self.sources


@torch.no_grad()
def rotations(model: LanguageModel, batch: Batch, look: Callable[[Rotation], Found]) -> list[Found]:
    """Return what `look` makes of every rotated mixer, in the order of the layers.

    Only one layer's tensors are kept at a time. Hooks in place act.
    """
    found: list[Found] = []
    rotated = find_rotary_pairs(model)
    seen: dict[str, Tensor] = {}

    def keep(tensor: Tensor, point: HookPoint) -> None:
        layer, _, name = point.name.removeprefix("blocks.").partition(".mixer.")
        seen[name] = tensor
        pairs = rotated[int(layer)]
        if len(seen) == len(list_hooks(pairs)):
            found.append(look(_read_sides(int(layer), pairs, seen)))
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


def paired(x: Float[Tensor, "b t h n"], layout: Layout) -> Complex[Tensor, "b t h m"]:
    """Return each pair of channels that rotates as one complex number."""
    shape, axis = ((2, -1), -2) if layout == "half" else ((-1, 2), -1)
    return torch.complex(*x.unflatten(-1, shape).unbind(axis))


def causal_means(
    rotation: Rotation,
) -> tuple[Float[np.ndarray, "c m"], Complex[np.ndarray, "c m"]]:
    """Return the means of |q||k| and of q̄k over all pairs of a target and a source ≤ it."""
    size, product = 0.0, 0.0
    for rows in rotation.blocks():
        q, k = rotation.q[rows], rotation.k[rows]
        size = size + (q.abs() * k.abs().cumsum(1)).sum((0, 1), dtype=torch.float64)
        product = product + (q.conj() * k.cumsum(1)).sum((0, 1), dtype=torch.complex128)
    assert isinstance(size, Tensor)
    assert isinstance(product, Tensor)
    b, t = rotation.q.shape[:2]
    count = b * t * (t + 1) / 2
    return (size / count).cpu().numpy(), (product / count).cpu().numpy()


def by_lag(
    rotation: Rotation, lags: Int[np.ndarray, " l"]
) -> tuple[Float[np.ndarray, "l c m"], Float[np.ndarray, "l h"], Float[np.ndarray, "l h"]]:
    """Return means over all pairs of each lag.

    Args:
        rotation: of a layer.
        lags: each in 0 … t − 1.

    Returns:
        what each frequency adds to the score, whose sum over m is the score; the decay
        exp Σ a between source and target, 1 without one; and the score times the decay.
    """
    device, seq_len = rotation.q.device, rotation.q.shape[1]
    turns = rotation.turn(torch.from_numpy(lags).to(device))
    groups = torch.from_numpy(rotation.groups).to(device)
    parts = torch.zeros(len(lags), *rotation.q.shape[2:], dtype=torch.float64, device=device)
    decays = torch.zeros(len(lags), len(groups), dtype=torch.float64, device=device)
    decayed = torch.zeros_like(decays)
    for rows in rotation.blocks():
        q, k = rotation.q[rows].conj(), rotation.k[rows]
        total = None if rotation.log_decay is None else rotation.log_decay[rows].double().cumsum(1)
        for i, lag in enumerate(lags.tolist()):
            added = (q[:, lag:] * k[:, : seq_len - lag] * turns[i]).real
            parts[i] += added.sum((0, 1), dtype=torch.float64)
            if total is not None:
                decay = (total[:, lag:] - total[:, : seq_len - lag]).exp()
                decays[i] += decay.sum((0, 1))
                decayed[i] += (added.sum(-1)[..., groups] * decay).sum((0, 1))
    count = len(rotation.q) * (seq_len - torch.from_numpy(lags).to(device))[:, None]
    parts = parts / count[..., None]
    if rotation.log_decay is None:
        decays, decayed = torch.ones_like(decays), parts.sum(-1)[:, groups]
    else:
        decays, decayed = decays / count, decayed / count
    return parts.cpu().numpy(), decays.cpu().numpy(), decayed.cpu().numpy()


def on_edges(rotation: Rotation, edges: Edges) -> Complex[Tensor, "e c m"]:
    """Return q̄k of each edge, not turned: times `rotation.turn(lag)`, its real part is added."""
    q = rotation.q[edges.rows, edges.targets]
    return q.conj() * rotation.k[edges.rows, edges.sources]


def linked(batch: Batch, target: str, source: str) -> Edges:
    """Return the edges between two links of a batch, padding left out."""
    targets, sources = batch.links[target], batch.links[source]
    real = (targets >= 0) & (sources >= 0)
    return Edges(real.nonzero()[:, 0], targets[real], sources[real])


def elsewhere(edges: Edges, seq_len: int, rng: np.random.Generator) -> Edges:
    """Return the placebo of edges: for each one of equal lag in the same row, anywhere."""
    lags = edges.lags.cpu().numpy()
    targets = torch.from_numpy(rng.integers(lags, seq_len)).to(edges.rows.device)
    return Edges(edges.rows, targets, targets - edges.lags)


def anywhere(batch: Batch, count: int, rng: np.random.Generator) -> Edges:
    """Return edges drawn from all causal ones, each as likely."""
    n_rows, seq_len = batch.inputs.shape
    rows = rng.integers(0, n_rows, count)
    # The lower triangle in the order of its rows: target t starts at entry t(t + 1)/2.
    entry = rng.integers(0, seq_len * (seq_len + 1) // 2, count)
    starts = np.arange(seq_len) * (np.arange(seq_len) + 1) // 2
    targets = np.searchsorted(starts, entry, side="right") - 1
    parts = (rows, targets, entry - starts[targets])
    return Edges(*(torch.from_numpy(part).to(batch.inputs.device) for part in parts))


def _read_sides(layer: int, pairs: RotaryPairs, seen: dict[str, Tensor]) -> Rotation:
    """Return what passed a mixer's hooks; every comparison gets its own source."""
    targets, sources = seen[pairs.target_hook], seen[pairs.source_hook]
    q = paired(targets.float() if targets.itemsize < 4 else targets, pairs.layout)
    k = paired(sources.to(q.real.dtype), pairs.layout)
    if pairs.source_of != tuple(range(k.shape[2])):
        k = k[:, :, list(pairs.source_of)]
    return Rotation(
        layer=layer,
        sides=pairs.sides,
        q=q,
        k=k,
        theta=pairs.base ** -(np.arange(pairs.n_pairs) / pairs.n_pairs),
        scale=pairs.scale,
        groups=np.array(pairs.comparison_of),
        log_decay=None if pairs.decay_hook is None else seen[pairs.decay_hook],
    )

"""What rotated mixers compare, frequency by frequency: queries with keys, C with B.

Pair m of a query and of a key is a complex number each, q and k, before the rotation turns them:

    score_ts = scale · Σ_m Re(q̄_tm k_sm e^{−i(t−s)θ_m})
             = scale · Σ_m [(q_m·k_m) cos((t−s)θ_m) + (q_m×k_m) sin((t−s)θ_m)]

with q·k = q₁k₁ + q₂k₂ and q×k = q₁k₂ − q₂k₁. Axis letters beside the package's: m pair of channels,
c comparison (a query head of attention, a group of SSD), l lag t − s, e edge (row, t, s).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from lab.hooks import HookPoint
from lab.layers.attention import Attention
from lab.layers.ssd import SSD
from lab.models import Block, LanguageModel
from lab.models.evaluation import score
from lab.ops.rope import Layout
from tasks.base import Batch

BLOCK_ENTRIES = 2**20
"""Pairs of channels that are compared at once: larger ones leave the processor's cache."""
Sides = Literal["Q/K", "C/B"]
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
    sides: Sides
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
    seen: dict[str, Tensor] = {}

    def keep(tensor: Tensor, point: HookPoint) -> None:
        layer, _, name = point.name.removeprefix("blocks.").partition(".mixer.hook_")
        seen[name] = tensor
        if name in ("k", "C_pre"):
            block = model.blocks[int(layer)]
            assert isinstance(block, Block)
            found.append(look(_rotation(int(layer), block.mixer, seen)))
            seen.clear()

    points = [
        f"blocks.{layer}.mixer.hook_{name}"
        for layer, mixer in rotated_mixers(model).items()
        for name in (
            ("q", "k") if isinstance(mixer, Attention) else ("log_decay", "B_pre", "C_pre")
        )
    ]
    if points:
        with model.hooks([(points, keep)]):
            score(model, batch, "fp32")
    return found


def rotated_mixers(model: LanguageModel) -> dict[int, Attention | SSD]:
    """Return the mixers that rotate what they compare, by layer."""
    blocks = [(i, block) for i, block in enumerate(model.blocks) if isinstance(block, Block)]
    return {
        layer: block.mixer
        for layer, block in blocks
        if isinstance(block.mixer, Attention | SSD) and block.mixer.position == "rope"
    }


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


def _rotation(layer: int, mixer: object, seen: dict[str, Tensor]) -> Rotation:
    """Put together what passed a mixer's hooks; every comparison gets its own key."""
    if isinstance(mixer, Attention):
        shared = mixer.n_heads // mixer.n_kv_heads
        q = paired(seen["q"].float() if seen["q"].itemsize < 4 else seen["q"], mixer.rope_layout)
        k = paired(seen["k"].to(q.real.dtype), mixer.rope_layout)
        k = k.repeat_interleave(shared, dim=2)
        scale, log_decay, groups = seen["q"].shape[-1] ** -0.5, None, np.arange(mixer.n_heads)
        sides: Sides = "Q/K"
    else:
        assert isinstance(mixer, SSD)
        q, k = (paired(seen[name], mixer.rope_layout) for name in ("C_pre", "B_pre"))
        groups = mixer.group_of_head.numpy()
        scale, log_decay, sides = 1.0, seen["log_decay"], "C/B"
    n_pairs = q.shape[-1]
    theta = mixer.rope_base ** -(np.arange(n_pairs) / n_pairs)
    return Rotation(layer, sides, q, k, theta, scale, groups, log_decay)

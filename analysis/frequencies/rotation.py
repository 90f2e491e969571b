"""The vectors that rotary mixers compare, and their products by frequency: of edges, and means.

Queries are compared with keys, C with B. Before rotation, pair m of channels is a complex number,
q on the target's side and k on the source's:

    score_ts = scale · Σ_m Re(q̄_tm k_sm e^{−i(t−s)θ_m})
             = scale · Σ_m [(q_m·k_m) cos((t−s)θ_m) + (q_m×k_m) sin((t−s)θ_m)]

with q·k = q₁k₁ + q₂k₂ and q×k = q₁k₂ − q₂k₁. Axis letters beside the package's: m pair of channels,
which is one frequency; c comparison (a query head of attention, a group of SSD); l lag t − s; e
edge from a target to an earlier source, (row, t, s).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor

from analysis.links import has_pairs
from analysis.words import name_head
from lab.hooks import HookPoint
from lab.layers.mixer import RotaryPairs
from lab.models import LanguageModel
from lab.models.evaluation import score
from lab.ops.rope import Layout
from tasks.base import Batch

BLOCK_ENTRIES = 2**20
"""Entries of q that are compared at once: larger blocks do not fit the processor's cache."""
EDGES = 4096
"""Maximum number of edges of a kind that are measured."""
ANSWERS = {
    "query → value": ("query_pos", "value_pos"),
    "value → key": ("value_pos", "key_pos"),
}
"""The kinds of edges that recall can use, with the links that they join."""
ROUNDING = 1e-5
"""Spread of scores, relative to their size, below which edges have equal scores."""
Found = TypeVar("Found")


@dataclass(frozen=True)
class Rotated:
    """A mixer that rotates what it compares.

    Attributes:
        sides: "Q/K" of attention, "C/B" of SSD.
    """

    layer: int
    sides: str

    def name_comparison(self, comparison: int, count: int) -> str:
        """Name one of its comparisons, such as "layer 0 (Q/K, head 0.1)"."""
        one = name_head(self.layer, comparison) if self.sides == "Q/K" else f"group {comparison}"
        return f"layer {self.layer} ({self.sides}{f', {one}' if count > 1 else ''})"


@dataclass(frozen=True)
class RotatedSides(Rotated):
    """The two sides that a mixer compares, before they are rotated.

    Attributes:
        q: targets, queries or C.
        k: sources, keys or B; one for each comparison.
        theta: rotation angle per token, in (0, 1].
        scale: 1/√p of attention's head width p; 1 of SSD.
        groups: the comparison that each head uses.
        log_decay: of SSD, ≤ 0; None for attention.
    """

    q: Complex[Tensor, "b t c m"]
    k: Complex[Tensor, "b t c m"]
    theta: Float[np.ndarray, " m"]
    scale: float
    groups: Int[np.ndarray, " h"]
    log_decay: Float[Tensor, "b t h"] | None

    @property
    def wavelengths(self) -> Float[np.ndarray, " m"]:
        """2π/θ, tokens."""
        return 2 * np.pi / self.theta

    @property
    def long(self) -> Bool[np.ndarray, " m"]:
        """Which wavelengths are longer than the row."""
        return self.wavelengths > self.q.shape[1]

    def turn(self, lags: Int[Tensor, " l"]) -> Complex[Tensor, "l m"]:
        """Return scale · e^{−i lag θ}, the factor of a product q̄k at that lag."""
        angles = lags[:, None].double() * torch.from_numpy(self.theta).to(lags.device)
        return torch.polar(torch.full_like(angles, self.scale), -angles).to(self.q.dtype)

    def split_rows(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield rows of the batch, a few at a time, with their q and k."""
        height = max(1, BLOCK_ENTRIES // self.q[0].numel())
        for first in range(0, len(self.q), height):
            rows = slice(first, first + height)
            yield rows, self.q[rows], self.k[rows]


@torch.no_grad()
def measure_rotated_sides(
    model: LanguageModel, batch: Batch, measure: Callable[[RotatedSides], Found]
) -> list[Found]:
    """Return what `measure` returns for every rotary mixer, in the order of the layers.

    Only one layer's tensors are kept at a time. Hooks that are in place take effect.
    """
    found: list[Found] = []
    seen: dict[str, Tensor] = {}
    points = {
        f"blocks.{layer}.mixer.{name}": (layer, name, pairs)
        for layer, pairs in find_rotary_pairs(model).items()
        for name in (pairs.target_hook, pairs.source_hook, pairs.decay_hook)
        if name is not None
    }

    def keep(tensor: Tensor, point: HookPoint) -> None:
        layer, name, pairs = points[point.name]
        seen[name] = tensor
        if len(seen) == 2 + (pairs.decay_hook is not None):
            found.append(measure(_read_sides(layer, pairs, seen)))
            seen.clear()

    if points:
        with model.hooks([(list(points), keep)]):
            score(model, batch, "fp32")
    return found


def find_rotary_pairs(model: LanguageModel) -> dict[int, RotaryPairs]:
    """Return how mixers rotate what they compare, by layer; those that do not are left out."""
    mixers = enumerate(block.mixer for block in model.list_blocks())
    found = {layer: mixer.rotary_pairs for layer, mixer in mixers if mixer is not None}
    return {layer: pairs for layer, pairs in found.items() if pairs is not None}


def pair_channels(x: Float[Tensor, "b t h n"], layout: Layout) -> Complex[Tensor, "b t h m"]:
    """Return each pair of channels that rotates together as one complex number."""
    shape, axis = ((2, -1), -2) if layout == "half" else ((-1, 2), -1)
    return torch.complex(*x.unflatten(-1, shape).unbind(axis))


def average_sizes(sides: RotatedSides) -> Float[np.ndarray, "c m"]:
    """Return the mean of |q||k| over all pairs of a target and a source ≤ it."""
    b, t, *shape = sides.q.shape
    total = torch.zeros(shape, dtype=torch.float64, device=sides.q.device)
    for _, q, k in sides.split_rows():
        total += (q.abs() * k.abs().cumsum(1)).sum((0, 1), dtype=torch.float64)
    return (total / (b * t * (t + 1) / 2)).cpu().numpy()


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
    for rows, q, k in sides.split_rows():
        total = None if sides.log_decay is None else sides.log_decay[rows].double().cumsum(1)
        for i, lag in enumerate(lags.tolist()):
            added = (q[:, lag:].conj() * k[:, : seq_len - lag] * turns[i]).real
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


@dataclass(frozen=True)
class Edges:
    """Pairs of a target and an earlier source."""

    rows: Int[Tensor, " e"]
    targets: Int[Tensor, " e"]
    sources: Int[Tensor, " e"]

    @property
    def lags(self) -> Int[Tensor, " e"]:
        """Target less source."""
        return self.targets - self.sources


def multiply_sides(sides: RotatedSides, edges: Edges) -> Complex[Tensor, "e c m"]:
    """Return q̄k of each edge; the score is the sum of Re(q̄k · `sides.turn(lag)`)."""
    q = sides.q[edges.rows, edges.targets]
    return q.conj() * sides.k[edges.rows, edges.sources]


def link_edges(batch: Batch, target: str, source: str) -> Edges:
    """Return the edges between two links of a batch, without padding."""
    targets, sources = batch.links[target], batch.links[source]
    real = (targets >= 0) & (sources >= 0)
    return Edges(real.nonzero()[:, 0], targets[real], sources[real])


def sample_placebo(edges: Edges, seq_len: int, rng: np.random.Generator) -> Edges:
    """Return a placebo of some edges: for each, a random one of equal lag in the same row."""
    lags = edges.lags.cpu().numpy()
    targets = torch.from_numpy(rng.integers(lags, seq_len)).to(edges.rows.device)
    return Edges(edges.rows, targets, targets - edges.lags)


def sample_edges(batch: Batch, count: int, rng: np.random.Generator) -> Edges:
    """Return edges drawn uniformly from all causal ones."""
    n_rows, seq_len = batch.inputs.shape
    rows = rng.integers(0, n_rows, count)
    # The lower triangle in the order of its rows: target t starts at entry t(t + 1)/2.
    entry = rng.integers(0, seq_len * (seq_len + 1) // 2, count)
    starts = np.arange(seq_len) * (np.arange(seq_len) + 1) // 2
    targets = np.searchsorted(starts, entry, side="right") - 1
    parts = (rows, targets, entry - starts[targets])
    return Edges(*(torch.from_numpy(part).to(batch.inputs.device) for part in parts))


def score_edges(sides: RotatedSides, edges: Edges) -> Float[np.ndarray, "e c m"]:
    """Return what each frequency adds to the score of each edge."""
    turned = multiply_sides(sides, edges) * sides.turn(edges.lags)[:, None]
    return turned.real.double().cpu().numpy()


def measure_score_spread(scores: Float[np.ndarray, "e c m"]) -> Float[np.ndarray, " c"]:
    """Return the standard deviation of the scores; infinite where they differ by rounding alone."""
    spread = scores.sum(-1).std(0)
    return np.where(spread > ROUNDING * np.abs(scores).sum(-1).mean(0), spread, np.inf)


def sample_answers(batch: Batch, rng: np.random.Generator) -> dict[str, Edges]:
    """Return at most `EDGES` random edges of each kind that recall can use; none without pairs."""
    if not has_pairs(batch):
        return {}
    kinds = {}
    for name, links in ANSWERS.items():
        edges = link_edges(batch, *links)
        chosen = torch.from_numpy(np.sort(rng.permutation(len(edges.rows))[:EDGES]))
        kinds[name] = Edges(*(z[chosen.to(z.device)] for z in vars(edges).values()))
    return kinds

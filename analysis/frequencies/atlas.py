"""One layer of the atlas of rotary frequencies: energy by frequency, score by lag, recall by both.

Axis letters as in `analysis.frequencies.spectra`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int

from analysis.frequencies.spectra import (
    Edges,
    Rotation,
    anywhere,
    by_lag,
    causal_means,
    elsewhere,
    linked,
    on_edges,
)
from analysis.links import has_pairs
from analysis.record import figure_only
from analysis.statistics.distributions import effective_number, shares
from analysis.statistics.intervals import bootstrap
from tasks.base import Batch

LAGS = 48
"""Lags of a curve, at most, evenly spaced on a logarithmic axis."""
FEWEST = 100
"""Pairs at a lag, at least, for their mean to be trusted to a tenth of a standard deviation."""
EDGES = 4096
"""Edges of a kind that are looked at, at most."""
ANSWERS = {
    "query → value": ("query_pos", "value_pos"),
    "value → key": ("value_pos", "key_pos"),
}
"""The edges that recall can use, and the links they join."""


@dataclass(frozen=True)
class Spectrum:
    """How much of what a mixer compares lies at which frequency.

    Attributes:
        layer: index of the block.
        sides: "Q/K" or "C/B".
        groups: by which comparison each head goes.
        wavelengths: 2π/θ, tokens.
        share: mean |q||k| over all causal pairs, as a share of the sum over frequencies.
        effective: e^H of the shares, from 1 to m.
        long: share of the energy on wavelengths longer than the row, which hardly turn in it.
        uniform_long: what that would be if all frequencies had the same share.
        coherence: |mean q̄k| / mean |q||k|, in [0, 1]; 1 where all pairs agree on the phase, so that
            the frequency says where, 0 where it depends on what they hold.
    """

    layer: int
    sides: str
    groups: Int[np.ndarray, " h"]
    wavelengths: Float[np.ndarray, " m"]
    share: Float[np.ndarray, "c m"]
    effective: Float[np.ndarray, " c"]
    long: Float[np.ndarray, " c"]
    uniform_long: float
    coherence: Float[np.ndarray, "c m"] = figure_only()


@dataclass(frozen=True)
class Curves:
    """How the score depends on the lag.

    Attributes:
        layer: index of the block.
        sides: "Q/K" or "C/B".
        groups: by which comparison each head goes.
        lags: tokens from the source to the target.
        pairs: how many pairs of the batch are at each lag.
        score: mean over all pairs at the lag; of attention in logits, without a mask's bias.
        decay: mean exp Σ a from source to target; 1 of attention.
        decayed: mean of score times decay.
        average: mean score of a causal pair, drawn at random.
        spread: standard deviation of the scores of such pairs.
        carried: by kind of edge, the mean score if what the edges join stood at that lag.
        wavelengths: 2π/θ, tokens.
        by_pair: what each frequency adds to `rise`, of the comparison `telling` alone.
    """

    layer: int
    sides: str
    groups: Int[np.ndarray, " h"]
    lags: Int[np.ndarray, " l"]
    pairs: Int[np.ndarray, " l"]
    score: Float[np.ndarray, "l c"]
    decay: Float[np.ndarray, "l h"]
    decayed: Float[np.ndarray, "l h"]
    average: Float[np.ndarray, " c"]
    spread: Float[np.ndarray, " c"]
    carried: dict[str, Float[np.ndarray, "l c"]]
    wavelengths: Float[np.ndarray, " m"]
    by_pair: Float[np.ndarray, "l m"] = figure_only()

    @property
    def telling(self) -> int:
        """The comparison whose score depends most on the lag, where a lag has pairs enough."""
        return telling(self.rise, self.pairs)

    @property
    def slowest(self) -> int:
        """The head of that comparison which decays least."""
        heads = np.flatnonzero(self.groups == self.telling)
        return int(heads[self.decay[:, heads].sum(0).argmax()])

    @property
    def rise(self) -> Float[np.ndarray, "l c"]:
        """How far the score stands above the average, in standard deviations of the scores."""
        return (self.score - self.average) / np.maximum(self.spread, np.finfo(np.float64).tiny)


@dataclass(frozen=True)
class Use:
    """What a kind of edge gets from each frequency, beyond other edges of the same lag.

    Attributes:
        layer: index of the block.
        sides: "Q/K" or "C/B".
        edge: its kind, a key of `ANSWERS`.
        count: edges looked at.
        lag: their median, tokens.
        wavelengths: 2π/θ, tokens.
        advantage: mean score of the edges less that of their placebo.
        best: the comparison with the largest effect, of whatever sign: SSD may read by negatives.
        interval: of the best one's advantage, 95 %, by resampling rows.
        effect: advantage in standard deviations of the placebo's scores.
        by_pair: what each frequency adds to the advantage.
        long: share of the advantage from wavelengths longer than the row; outside 0 … 1 where the
            others pull the other way.
        uniform_long: share of the frequencies that are so long.
    """

    layer: int
    sides: str
    edge: str
    count: int
    lag: float
    wavelengths: Float[np.ndarray, " m"]
    advantage: Float[np.ndarray, " c"]
    best: int
    interval: tuple[float, float]
    effect: Float[np.ndarray, " c"]
    by_pair: Float[np.ndarray, "c m"]
    long: Float[np.ndarray, " c"]
    uniform_long: float


def spectrum(rotation: Rotation) -> Spectrum:
    """Measure how a mixer spreads what it compares over its frequencies."""
    size, product = causal_means(rotation)
    share = shares(size)
    waves = 2 * np.pi / rotation.theta
    long = waves > rotation.q.shape[1]
    return Spectrum(
        layer=rotation.layer,
        sides=rotation.sides,
        groups=rotation.groups,
        wavelengths=waves,
        share=share,
        coherence=np.abs(product) / np.maximum(size, np.finfo(np.float64).tiny),
        effective=effective_number(size),
        long=share[:, long].sum(-1),
        uniform_long=float(long.mean()),
    )


def curves(
    rotation: Rotation, kinds: dict[str, Edges], batch: Batch, rng: np.random.Generator
) -> Curves:
    """Measure how a mixer's scores depend on the lag; `kinds` are edges to carry to all of them."""
    lags = lag_grid(rotation.q.shape[1])
    parts, decay, decayed = by_lag(rotation, lags)
    pairs = len(rotation.q) * (rotation.q.shape[1] - lags)
    at_random = scores(rotation, anywhere(batch, EDGES, rng))
    average, spread = at_random.sum(-1).mean(0), at_random.sum(-1).std(0)
    rise = (parts - at_random.mean(0)) / np.maximum(spread, np.finfo(np.float64).tiny)[:, None]
    turns = rotation.turn(torch.from_numpy(lags).to(rotation.q.device))

    def carried(edges: Edges) -> Float[np.ndarray, "l c"]:
        mean = on_edges(rotation, edges).mean(0)
        return torch.einsum("cm,lm->lc", mean, turns).real.double().cpu().numpy()

    return Curves(
        layer=rotation.layer,
        sides=rotation.sides,
        groups=rotation.groups,
        lags=lags,
        pairs=pairs,
        score=parts.sum(-1),
        decay=decay,
        decayed=decayed,
        average=average,
        spread=spread,
        carried={name: carried(edges) for name, edges in kinds.items()},
        wavelengths=2 * np.pi / rotation.theta,
        by_pair=rise[:, telling(rise.sum(-1), pairs)].astype(np.float32),
    )


def telling(rise: Float[np.ndarray, "l c"], pairs: Int[np.ndarray, " l"]) -> int:
    """Return the comparison whose score depends most on the lag, where a lag has pairs enough."""
    enough = pairs >= FEWEST
    return int(np.ptp(rise[enough] if enough.any() else rise, axis=0).argmax())


def use(rotation: Rotation, name: str, edges: Edges, rng: np.random.Generator) -> Use:
    """Measure what a kind of edge gets from each frequency."""
    found = scores(rotation, edges)
    placebo = scores(rotation, elsewhere(edges, rotation.q.shape[1], rng))
    by_pair = (found - placebo).mean(0)
    advantage = by_pair.sum(-1)
    spread = np.maximum(placebo.sum(-1).std(0), np.finfo(np.float64).tiny)
    best = int(np.abs(advantage / spread).argmax())
    waves = 2 * np.pi / rotation.theta
    long = waves > rotation.q.shape[1]
    gained = (found - placebo)[:, best].sum(-1)
    # A row's edges are not independent.
    sums, counts = (np.bincount(edges.rows.cpu(), weights) for weights in (gained, None))
    interval = bootstrap(
        np.stack([sums, counts], 1)[counts > 0],
        rng,
        statistic=lambda z: z[:, 0].sum() / z[:, 1].sum(),
    )
    return Use(
        layer=rotation.layer,
        sides=rotation.sides,
        edge=name,
        count=len(edges.rows),
        lag=float(edges.lags.double().median()),
        wavelengths=waves,
        advantage=advantage,
        best=best,
        interval=interval,
        effect=advantage / spread,
        by_pair=by_pair,
        long=np.divide(
            by_pair[:, long].sum(-1),
            advantage,
            out=np.full(len(advantage), np.nan),
            where=advantage != 0,
        ),
        uniform_long=float(long.mean()),
    )


def scores(rotation: Rotation, edges: Edges) -> Float[np.ndarray, "e c m"]:
    """Return what each frequency adds to the score of each edge."""
    turned = on_edges(rotation, edges) * rotation.turn(edges.lags)[:, None]
    return turned.real.double().cpu().numpy()


def answers(batch: Batch, rng: np.random.Generator) -> dict[str, Edges]:
    """Return the edges that recall can use, by kind, at most `EDGES` each; none without pairs."""
    if not has_pairs(batch):
        return {}
    kinds = {}
    for name, links in ANSWERS.items():
        edges = linked(batch, *links)
        count = len(edges.rows)
        chosen = np.sort(rng.permutation(count)[:EDGES])
        picked = (z[torch.from_numpy(chosen).to(z.device)] for z in vars(edges).values())
        kinds[name] = Edges(*picked)
    return kinds


def lag_grid(seq_len: int) -> Int[np.ndarray, " l"]:
    """Return lags from 1 to seq_len − 1, dense where they are short."""
    return np.unique(np.geomspace(1, seq_len - 1, LAGS).round().astype(np.int64))


def half_life(layer: Curves) -> int | None:
    """Return the first lag at which a layer's slowest decay has halved, if any has."""
    halved = (layer.decay <= 0.5).all(1)
    return int(layer.lags[halved.argmax()]) if halved.any() else None

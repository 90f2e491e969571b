"""What each rotary frequency adds to scores: to all of them, and to those of answer edges.

Axis letters as in `analysis.frequencies.rotation`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from analysis.base import Finding, Table
from analysis.figures import Axis, Colors, Map, heat
from analysis.figures.theme import GREEN
from analysis.frequencies.rotation import (
    Edges,
    Rotated,
    RotatedSides,
    average_sizes,
    measure_score_spread,
    sample_placebo,
    score_edges,
)
from analysis.statistics.distributions import compute_shares, effective_number
from analysis.words import format_digits, percent
from lab.intervals import Z95, bootstrap_ratio

LEANS = 0.1
"""How far a share must be from a uniform spectrum's for the spectrum to lean."""
DOUBLINGS = 3
"""Where the colours end: at eight times a uniform share, and at an eighth."""
ROW = 18
"""Height of a row of a heat map, px."""


@dataclass(frozen=True)
class FrequencySpectrum(Rotated):
    """How much of what a mixer compares lies at which frequency.

    Attributes:
        share: mean |q||k| over all causal pairs, as a share of the sum over frequencies.
        effective: e^H of the shares, from 1 to m.
        long: share of the energy on wavelengths longer than the row, which hardly turn in it.
        uniform_long: the same if all frequencies had equal shares.
    """

    wavelengths: Float[np.ndarray, " m"]
    share: Float[np.ndarray, "c m"]
    effective: Float[np.ndarray, " c"]
    long: Float[np.ndarray, " c"]
    uniform_long: float


@dataclass(frozen=True)
class Energies(Finding):
    """The spectra of all rotary mixers."""

    layers: tuple[FrequencySpectrum, ...]
    seq_len: int

    title = "Energy of Q/K and C/B by rotary frequency"
    reading = (
        "A cell is a pair of channels. The colour is its share of |q||k|, averaged over all causal "
        "pairs of tokens, as a multiple of an equal share. The line marks the row's length: longer "
        "wavelengths, on its right, rotate less than once in a row and can carry content; those "
        "within the row tell positions. The table has the comparison of each layer that is "
        "furthest from a uniform spectrum, for the first eight layers."
    )

    @property
    def says(self) -> str:
        """How many layers lean to long and to short wavelengths."""
        leans = [float((layer.long - layer.uniform_long).mean()) for layer in self.layers]
        return (
            "Layers whose energy leans to wavelengths longer than the row: "
            f"{sum(x > LEANS for x in leans)} of {len(leans)}; to wavelengths within it: "
            f"{sum(x < -LEANS for x in leans)} of {len(leans)}."
        )

    def numbers(self) -> Table:
        """Return the energy on long wavelengths, and how many frequencies are used."""
        rows = []
        for layer in self.layers[:8]:
            # What compares nothing has no spectrum, NaN.
            at = int(np.nan_to_num(np.abs(layer.long - layer.uniform_long), nan=-1.0).argmax())
            used = f"{format_digits(layer.effective[at])} of {len(layer.wavelengths)}"
            shares = percent(layer.long[at]), percent(layer.uniform_long)
            rows.append((layer.name_comparison(at, len(layer.long)), *shares, used))
        columns = ("", "energy beyond the row", "if uniform", "effective frequencies")
        return Table(columns, tuple(rows))

    def figure(self) -> go.Figure:
        """Draw the spectra, a row per comparison, wavelength to the right."""
        multiples = [layer.share * layer.share.shape[1] for layer in self.layers]
        return draw_by_wavelength(
            self.layers,
            [layer.sides for layer in self.layers],
            [np.log2(np.maximum(z, 2.0**-10)) for z in multiples],
            [[""] * len(z) for z in multiples],
            self.seq_len,
            Colors(
                "share, as a multiple of a uniform spectrum's",
                ends=(-DOUBLINGS, DOUBLINGS),
                ticks={-3.0: "⅛", -2.0: "¼", -1.0: "½", 0.0: "1", 1.0: "2", 2.0: "4", 3.0: "8"},
            ),
        )


def measure_spectrum(sides: RotatedSides) -> FrequencySpectrum:
    """Measure how a mixer spreads what it compares over its frequencies."""
    size = average_sizes(sides)
    share = compute_shares(size)
    return FrequencySpectrum(
        layer=sides.layer,
        sides=sides.sides,
        wavelengths=sides.wavelengths,
        share=share,
        effective=effective_number(size),
        long=share[:, sides.long].sum(-1),
        uniform_long=float(sides.long.mean()),
    )


@dataclass(frozen=True)
class FrequencyUse(Rotated):
    """What a kind of edge gets from each frequency, beyond other edges of the same lag.

    Attributes:
        advantage: mean score of the edges less that of their placebo.
        best: the comparison with the largest effect of either sign: SSD may read by negatives.
        interval: of the best one's advantage, 95 %, by resampling rows.
        effect: advantage in standard deviations of the placebo's scores.
        by_pair: what each frequency adds to the advantage.
        long: share of the advantage from wavelengths longer than the row; outside 0 … 1 where the
            others pull the other way.
        uniform_long: share of the frequencies whose wavelengths are so long.
    """

    edge: str
    wavelengths: Float[np.ndarray, " m"]
    advantage: Float[np.ndarray, " c"]
    best: int
    interval: tuple[float, float]
    effect: Float[np.ndarray, " c"]
    by_pair: Float[np.ndarray, "c m"]
    long: Float[np.ndarray, " c"]
    uniform_long: float

    @property
    def effect_by_pair(self) -> Float[np.ndarray, "c m"]:
        """What each frequency adds, in standard deviations of the placebo's scores."""
        spread = self.advantage / np.where(self.effect == 0, 1, self.effect)
        return self.by_pair / np.where(spread == 0, 1, spread)[:, None]

    def is_sure(self, tried: int) -> bool:
        """Whether its best comparison, chosen among so many, stands out (Bonferroni's bound)."""
        widening = NormalDist().inv_cdf(1 - 0.025 / tried) / Z95
        value, (low, high) = float(self.advantage[self.best]), self.interval
        half = value - low if value > 0 else high - value
        return abs(value) > widening * half and self.effect[self.best] != 0


@dataclass(frozen=True)
class FrequencyUses(Finding):
    """What answer edges get from each frequency, in all rotary mixers.

    Attributes:
        layers: by kind of edge, then by layer.
    """

    layers: tuple[FrequencyUse, ...]
    seq_len: int

    title = "What answer edges get from each rotary frequency"
    reading = (
        "The colour is what a frequency adds to the mean score of the edges, less what it adds to "
        "random edges of equal lag in the same rows, in standard deviations of the random edges' "
        "scores. The sum over frequencies stands beside a row's name; a large negative one counts "
        "too, since SSD reads with a sign. A share below 0 or above 100 % means that the other "
        "frequencies pull the other way. The line marks the row's length."
    )

    def find_sure(self) -> list[FrequencyUse]:
        """Return the layer that each kind of edge gets most from, where it surely stands out."""
        tops = []
        for edge in dict.fromkeys(use.edge for use in self.layers):
            uses = [use for use in self.layers if use.edge == edge]
            top = max(uses, key=lambda use: abs(float(use.effect[use.best])))
            tops += [top] if top.is_sure(sum(len(use.effect) for use in uses)) else []
        return tops

    @property
    def says(self) -> str:
        """Which kinds of edges surely stand out."""
        sure = [
            f"{use.edge} in {use.name_comparison(use.best, len(use.effect))}"
            for use in self.find_sure()
        ]
        found = "; ".join(sure) or "none"
        return f"Answer edges whose scores surely differ from those of random edges: {found}."

    def numbers(self) -> Table | None:
        """Return how far they stand out, and how much of that comes from long wavelengths."""
        rows = [
            (
                use.edge,
                f"{use.effect[use.best]:+.2f}",
                percent(use.long[use.best]),
                percent(use.uniform_long),
            )
            for use in self.find_sure()
        ]
        columns = ("edges", "standard deviations", "of it from beyond the row", "if uniform")
        return Table(columns, tuple(rows)) if rows else None

    def figure(self) -> go.Figure:
        """Draw what each frequency adds, a panel per kind of edge, a row per comparison."""
        cells = [use.effect_by_pair for use in self.layers]
        bound = float(np.quantile(np.abs(np.concatenate([z.ravel() for z in cells])), 0.995)) or 1.0
        return draw_by_wavelength(
            self.layers,
            [f"{use.edge} · {use.sides}" for use in self.layers],
            cells,
            [[f" ({effect:+.2f})" for effect in use.effect] for use in self.layers],
            self.seq_len,
            Colors("added to the score, standard deviations", ends=(-bound, bound)),
        )


def measure_use(
    sides: RotatedSides, name: str, edges: Edges, rng: np.random.Generator
) -> FrequencyUse:
    """Measure what a kind of edge gets from each frequency."""
    found = score_edges(sides, edges)
    placebo = score_edges(sides, sample_placebo(edges, sides.q.shape[1], rng))
    by_pair = (found - placebo).mean(0)
    advantage = by_pair.sum(-1)
    # A head that scores by position alone gives edges of equal lag equal scores, but for rounding.
    effect = advantage / measure_score_spread(placebo)
    best = int(np.abs(effect).argmax())
    # A row's edges are not independent.
    gained = (found - placebo)[:, best].sum(-1)
    sums, counts = (np.bincount(edges.rows.cpu(), weights) for weights in (gained, None))
    long = by_pair[:, sides.long].sum(-1)
    return FrequencyUse(
        layer=sides.layer,
        sides=sides.sides,
        edge=name,
        wavelengths=sides.wavelengths,
        advantage=advantage,
        best=best,
        interval=bootstrap_ratio(np.stack([sums, counts], 1)[counts > 0], rng),
        effect=effect,
        by_pair=by_pair,
        long=np.divide(long, advantage, out=np.full_like(advantage, np.nan), where=advantage != 0),
        uniform_long=float(sides.long.mean()),
    )


def draw_by_wavelength(
    layers: Sequence[FrequencySpectrum | FrequencyUse],
    titles: Sequence[str],
    cells: Sequence[Float[np.ndarray, "c m"]],
    notes: Sequence[Sequence[str]],
    seq_len: int,
    colors: Colors,
) -> go.Figure:
    """Draw a row per comparison, wavelength to the right, with a line at the row's length.

    Args:
        layers: whose comparisons.
        titles: of the map of each layer; those of one title and equal wavelengths share it.
        cells: colours of each layer.
        notes: what is written behind the name of each row of a layer.
        seq_len: the row's length, tokens.
        colors: what the colours mean.
    """
    groups: dict[tuple[str | float, ...], list[int]] = {}
    for i, layer in enumerate(layers):
        groups.setdefault((titles[i], *layer.wavelengths.tolist()), []).append(i)
    maps = []
    for chosen in groups.values():
        title, waves = titles[chosen[0]], layers[chosen[0]].wavelengths
        rows = [
            f"{layers[i].layer}{f'.{c}' if len(cells[i]) > 1 else ''}{note}"
            for i in chosen
            for c, note in enumerate(notes[i])
        ]
        hover = [[f"layer {row}, wavelength {wave:,.1f} tokens" for wave in waves] for row in rows]
        values = np.concatenate([cells[i] for i in chosen])
        maps.append(Map(values, rows, waves, title=title, notes=hover))
    every = np.concatenate([[float(seq_len)], *(layer.wavelengths for layer in layers)])
    ends = float(every.min()) / 1.5, float(every.max()) * 1.5
    x = Axis("wavelength 2π/θ, tokens", scale="log", ends=ends)
    fig = heat(maps, colors, x, Axis("layer"), row=ROW)
    return fig.add_vline(seq_len, line={"color": GREEN, "width": 2})

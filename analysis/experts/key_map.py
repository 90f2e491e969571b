"""Which experts are chosen, and together with which? Their product keys, and pairs of experts.

n tokens    s choices a token makes, all retrieval heads together    p pairs that occur

Only pairs that occur are stored: a table of all pairs of a million experts would not fit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int
from plotly.subplots import make_subplots

from analysis.base import Finding, NotApplicableError, Subject, Table, thin
from analysis.experts.load import TABLED, ExpertChoices, record_choices
from analysis.figures import Axis, Curves, Line, curves
from analysis.figures.axes import choose_log_ticks
from analysis.figures.theme import MUTED, VERMILLION, WIDTH, new_figure
from analysis.plain import figure_only
from analysis.statistics import distributions
from analysis.words import percent
from lab.models import LanguageModel
from tasks.base import Batch

__all__ = ["TITLE", "measure"]

TITLE = "Map of experts"
INITIAL = 2**13
"""About how many tokens the choices before training are measured on."""
SIDE = 128
"""Maximum number of cells on a side of a map; a larger grid is drawn as means of square blocks."""
DECADES = 3
"""Range of the colours below the most loaded cell, powers of ten."""
TALLEST = 460
"""Maximum height of a map, px of its layout; a map that would be taller has oblong cells."""
LABELS = 2**16
"""Maximum number of choices of a layer whose row and column are compared."""
ROUNDS = 100
"""Shuffles in which token ids exchange their columns."""
BOUND = 0.5
"""Overlap from which on two experts count as bound together."""
EDGES = np.linspace(-4, 10, 141)
"""Edges of the bins of PMI, nats."""
PAIRS, FEWEST_PAIRS = 2**20, 2**16
"""Co-occurrences that are counted at most, all layers together, and of each layer at least."""
SHUFFLES = 19
"""Shuffles of all layers; a claim that beats the best of them is then wrong 1 time in 20."""
OFTEN = 5
"""Minimum number of tokens that choose a pair that is named."""
SLIGHT = 0.01
"""Excess of the mean PMI that is negligible, nats: pairs meet 1 % more often."""
VISIBLE = 0.01
"""Height of a bin, relative to the highest, from which on the axis includes it."""


def collect_choices(model: LanguageModel, batch: Batch) -> list[ExpertChoices]:
    """Collect what a batch chooses in each layer with product-key experts.

    Raises:
        NotApplicableError: for a model without such a layer.
    """
    found = [chosen for chosen in record_choices(model, batch) if chosen.shape]
    if not found:
        raise NotApplicableError("no block retrieves experts by product keys")
    return found


def draw_tokens(
    chosen: ExpertChoices, most: int, rng: np.random.Generator
) -> tuple[Int[np.ndarray, "n s"], Int[np.ndarray, " n"]]:
    """Draw the experts and ids of at most `most` tokens, but of one at least."""
    experts, most = chosen.indices.reshape(len(chosen.ids), -1), max(1, most)
    if len(experts) <= most:
        return experts, chosen.ids
    kept = rng.choice(len(experts), most, replace=False)
    return experts[kept], chosen.ids[kept]


def exchange_ids(ids: Int[np.ndarray, " n"], rng: np.random.Generator) -> Int[np.ndarray, " n"]:
    """Return for each token the index of a token to replace it: token ids are permuted as a whole.

    All tokens of an id get tokens of one other id, drawn with replacement. Tokens of one id choose
    much alike; if tokens were shuffled singly, they would look like independent ones.
    """
    known, kind, size = np.unique(ids, return_inverse=True, return_counts=True)
    order = np.argsort(kind, kind="stable")
    new = rng.permutation(len(known))[kind]
    return order[(np.cumsum(size) - size)[new] + rng.integers(size[new])]


@dataclass(frozen=True)
class LoadMap(Finding):
    """The choices of a layer on its grid of product keys; expert = row · columns + column.

    I(row; column) is taken over choices; it is 0 if the map is the product of its marginals.

    Attributes:
        constant: whether every token chooses the same experts.
        looked_at: choices behind the numbers that follow, of a random sample of tokens.
        information: I(row; column), plug-in, nats.
        corrected: the same, Miller–Madow.
        null: 97.5 % quantile of the plug-in value if token ids exchange their columns.
        ids: different input tokens among those that are compared.
        most: the smaller of the entropies of row and column, nats, the largest possible value.
    """

    layer: int
    tokens: int
    row_share: Float[np.ndarray, " rows"]
    column_share: Float[np.ndarray, " columns"]
    used: int
    constant: bool
    zero_keys: bool
    looked_at: int
    information: float
    corrected: float
    null: float
    ids: int
    most: float
    counts: Int[np.ndarray, "rows columns"] = figure_only()
    title: str = figure_only()

    reading = (
        "Expert e = row · columns + column. The colour is an expert's share of all choices, in "
        "multiples of the uniform share, on a logarithmic scale. The darkest colour stands for "
        f"{10**DECADES:,} times less than the most loaded expert, or still less; empty cells were "
        "never chosen. Bars are the shares of the keys; dotted lines are uniform. Tokens of one id "
        "choose alike, so the shuffled I(row; column), a 97.5 % quantile, gives each token id the "
        "columns of another. The corrected value is Miller and Madow's."
    )

    @property
    def says(self) -> str:
        """How many experts are chosen, and whether row and column key depend on each other."""
        total = self.counts.size
        if self.constant:
            return (
                f"Each of {self.tokens:,} tokens chooses the same {self.used} of {total:,} experts."
            )
        beyond = "beyond" if self.information > self.null else "no better than by"
        return (
            f"{self.used:,} of {total:,} experts are chosen at all, and the row key predicts the "
            f"column key {beyond} chance: I(row; column) = {self.information:.3f} of at most "
            f"{self.most:.2f} nats (shuffled: {self.null:.3f})."
        )

    def numbers(self) -> Table:
        """Return the heaviest keys, and what I(row; column) rests on."""
        rows = [
            (
                f"heaviest {name} key",
                f"{share.argmax()}, {percent(float(share.max()))} (uniform: "
                f"{percent(1 / len(share))})",
            )
            for name, share in (("row", self.row_share), ("column", self.column_share))
        ]
        rows += [
            ("I(row; column), corrected", f"{self.corrected:.3f} nats"),
            ("choices compared", f"{self.looked_at:,} of {self.ids:,} token ids"),
            ("all keys are zero, so that all scores tie", "yes" if self.zero_keys else "no"),
        ]
        return Table(("", ""), tuple(rows))

    def figure(self) -> go.Figure:
        """Draw the map, with bars for the column keys above it and the row keys to its right."""
        rows, columns = self.counts.shape
        pool = find_pool(self.counts.shape)
        load = average_blocks(self.counts * (self.counts.size / self.counts.sum()), pool)
        levels = np.log10(load, out=np.full(load.shape, np.nan), where=load > 0)
        floor = float(np.nanmax(levels)) - DECADES
        side = min(0.79 * (WIDTH - 74) * load.shape[0] / load.shape[1], TALLEST)
        above, margins = 64, {"t": 58, "b": 100}
        fig = make_subplots(
            rows=2,
            cols=2,
            row_heights=[above, side],
            column_widths=[0.82, 0.18],
            horizontal_spacing=0.035,
            vertical_spacing=10 / (above + side + 10),
            specs=[[{}, None], [{}, {}]],
            figure=new_figure(round(above + side + 10 + margins["t"] + margins["b"])),
        )
        fig.add_heatmap(
            # At least 0, since plotly uses the diverging scale for values of both signs.
            z=np.maximum(levels - floor, 0).astype(np.float32),
            x0=(pool - 1) / 2,
            dx=pool,
            y0=(pool - 1) / 2,
            dy=pool,
            customdata=load.astype(np.float32),
            coloraxis="coloraxis",
            hoverongaps=False,
            hovertemplate="row %{y}, column %{x}: %{customdata:.3g} × uniform<extra></extra>",
            row=2,
            col=1,
        )
        look = {"marker": {"color": MUTED, "line_width": 0}, "showlegend": False}
        fig.add_bar(y=self.column_share, name="column", row=1, col=1, **look)
        fig.add_bar(x=self.row_share, name="row", orientation="h", row=2, col=2, **look)
        uniform = {"width": 1.5, "dash": "dot", "color": VERMILLION}
        places: list[Any] = [{"row": 1, "col": 1}, {"row": 2, "col": 2}]
        fig.add_hline(1 / columns, line=uniform, **places[0])
        fig.add_vline(1 / rows, line=uniform, **places[1])
        # Cells are squares in windows of any width, and the bars stay beside their cells.
        hidden = {"showticklabels": False, "ticks": ""}
        fig.update_xaxes(range=[-0.5, columns - 0.5], showgrid=False, col=1)
        fig.update_yaxes(range=[rows - 0.5, -0.5], showgrid=False, row=2)
        fig.update_xaxes(matches="x2", **hidden, row=1, col=1)
        fig.update_yaxes(matches="y2", **hidden, row=2, col=2)
        fig.update_xaxes(title_text="column key", row=2, col=1)
        anchor = "x2" if side < TALLEST else None
        fig.update_yaxes(title_text="row key", scaleanchor=anchor, row=2, col=1)
        percents = {"title_text": "share", "tickformat": ".0%", "nticks": 3, "rangemode": "tozero"}
        fig.update_yaxes(**percents, row=1, col=1)
        fig.update_xaxes(**percents, row=2, col=2)
        steps = choose_log_ticks(10**floor, 10 ** (floor + DECADES))
        ticks = {
            "tickvals": [math.log10(step) - floor for step in steps],
            "ticktext": [f"×{step}" for step in steps.values()],
        }
        scale = {"cmin": 0, "cmax": DECADES, "colorbar": ticks}
        return fig.update_layout(margin=margins, bargap=0, coloraxis=scale)


def map_load(chosen: ExpertChoices, rng: np.random.Generator) -> LoadMap:
    """Map the choices of a layer on its grid."""
    assert chosen.shape
    (rows, columns), per_token = chosen.shape, chosen.indices[0].size
    counts = np.bincount(chosen.indices.ravel(), minlength=rows * columns).reshape(rows, columns)
    experts, ids = draw_tokens(chosen, LABELS // per_token, rng)
    row, column = np.divmod(experts, columns)
    joint = distributions.count_joint(row.ravel(), column.ravel())
    null = []
    for _ in range(ROUNDS):
        other = column[exchange_ids(ids, rng)]
        # Which of another token's columns meets which row is random, too.
        met = distributions.count_joint(row.ravel(), rng.permuted(other, axis=1).ravel())
        null.append(distributions.mutual_information(met))
    every = np.sort(chosen.indices.reshape(len(chosen.ids), -1), axis=1)
    pool, grid = find_pool(chosen.shape), f"{rows} × {columns} experts"
    title = f"Layer {chosen.layer} · {chosen.kind} · load on the grid of {grid}"
    return LoadMap(
        layer=chosen.layer,
        tokens=len(every),
        row_share=distributions.compute_shares(counts.sum(1)),
        column_share=distributions.compute_shares(counts.sum(0)),
        used=int((counts > 0).sum()),
        constant=bool((every == every[0]).all()),
        zero_keys=chosen.zero_keys,
        looked_at=row.size,
        information=distributions.mutual_information(joint),
        corrected=distributions.miller_madow(joint),
        null=float(np.quantile(null, 0.975)),
        ids=len(np.unique(ids)),
        most=float(min(distributions.entropy(joint.sum(1)), distributions.entropy(joint.sum(0)))),
        counts=counts,
        title=f"{title}, means of {pool} × {pool}" if pool > 1 else title,
    )


def find_pool(shape: tuple[int, ...]) -> int:
    """Return how many experts a cell of a map has on each side."""
    return math.ceil(max(shape) / SIDE)


def average_blocks(
    load: Float[np.ndarray, "rows columns"], pool: int
) -> Float[np.ndarray, "high wide"]:
    """Return the mean of each pool × pool block, smaller at the far edges."""
    sums, sizes = load, np.ones_like(load)
    for axis in (0, 1):
        starts = np.arange(0, load.shape[axis], pool)
        sums, sizes = (np.add.reduceat(part, starts, axis) for part in (sums, sizes))
    return sums / sizes


@dataclass(frozen=True)
class ExpertPairs:
    """The pairs of different experts that at least one token chooses together.

    Attributes:
        both: tokens that choose both, ≥ 1.
        expected: how many would if the two were independent, n_e n_f / n.
        pmi: pointwise mutual information log(both/expected), nats: 0 for independent experts.
        overlap: share of the tokens with either expert that choose both, in (0, 1].
    """

    first: Int[np.ndarray, " p"]
    second: Int[np.ndarray, " p"]
    both: Int[np.ndarray, " p"]
    expected: Float[np.ndarray, " p"]
    pmi: Float[np.ndarray, " p"]
    overlap: Float[np.ndarray, " p"]

    @property
    def mean_pmi(self) -> float:
        """The mean over co-occurrences, so that rare pairs weigh little; NaN without pairs."""
        return float(np.average(self.pmi, weights=self.both)) if len(self.both) else math.nan

    def compute_aligned_share(self, columns: int) -> float:
        """Return the share of co-occurrences with a row key or a column key in common."""
        first, second = np.divmod(self.first, columns), np.divmod(self.second, columns)
        same = (first[0] == second[0]) | (first[1] == second[1])
        return float(self.both[same].sum() / max(1, self.both.sum()))

    def bin_pmi(self) -> Float[np.ndarray, " bins"]:
        """Return the share of co-occurrences in each bin of PMI; the outer bins take the rest."""
        inside = np.clip(self.pmi, EDGES[0], np.nextafter(EDGES[-1], 0))
        return np.histogram(inside, EDGES, weights=self.both)[0] / max(1, self.both.sum())


def count_pairs(chosen: Int[np.ndarray, "n s"]) -> ExpertPairs:
    """Count the tokens that choose each pair of different experts."""
    experts = np.sort(chosen, axis=1)
    fresh = np.diff(experts, axis=1, prepend=-1) > 0
    names, alone = np.unique(experts[fresh], return_counts=True)
    # Number only the experts that occur, so that the keys of pairs do not overflow.
    place = np.searchsorted(names, experts)
    i, j = np.triu_indices(experts.shape[1], 1)
    keys = (place[:, i] * len(names) + place[:, j])[fresh[:, i] & fresh[:, j]]
    if len(names) ** 2 <= len(keys):
        # A table of all pairs is no larger than the keys, and faster than sorting them.
        table = np.bincount(keys)
        pairs = np.flatnonzero(table)
        both = table[pairs]
    else:
        pairs, both = np.unique(keys, return_counts=True)
    first, second = np.divmod(pairs, len(names))
    expected = alone[first] * alone[second].astype(np.float64) / len(chosen)
    overlap = both / (alone[first] + alone[second] - both)
    ends = names[first], names[second]
    return ExpertPairs(*ends, both, expected, np.log(both / expected), overlap)


def shuffle_choices(
    experts: Int[np.ndarray, "n s"], ids: Int[np.ndarray, " n"], rng: np.random.Generator
) -> Int[np.ndarray, "n s"]:
    """Take each of the s choices of a token from another token id, independently.

    Experts keep about the same loads; which ones are chosen together is left to chance.
    """
    return np.stack([slot[exchange_ids(ids, rng)] for slot in experts.T], axis=1)


def find_coalition(pairs: ExpertPairs) -> Int[np.ndarray, " members"]:
    """Find the largest set of experts connected by pairs whose overlap is at least one half.

    Returns:
        its members, ascending; empty where no pair overlaps so much.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges = pairs.overlap >= BOUND
    ends = np.stack([pairs.first[edges], pairs.second[edges]])
    members, places = np.unique(ends, return_inverse=True)
    if not len(members):
        return members
    graph = coo_array((np.ones(places.size // 2), places.reshape(2, -1)), (len(members),) * 2)
    label = connected_components(graph, directed=False)[1]
    return members[label == np.bincount(label).argmax()]


@dataclass(frozen=True)
class TopPair:
    """Two experts that are often chosen by the same token, by their places (row, column).

    `both` tokens choose both, `expected` would if the two were independent.
    """

    first: tuple[int, int]
    second: tuple[int, int]
    both: int
    expected: float


@dataclass(frozen=True)
class LayerPairs:
    """The pairs of experts that a layer's tokens choose together.

    Attributes:
        mean_pmi: over co-occurrences, nats; NaN without pairs. Independent choices are near
            log(1 − 1/s), not 0, since the s choices of a token compete.
        initial: the same before training; None if unknown.
        null: the same for each shuffle of the choices among token ids.
        aligned: share of co-occurrences with the row key or the column key in common.
        aligned_null: its mean over shuffles.
        coalition: experts of the largest set that is bound together (`find_coalition`).
        top: the pair that exceeds independence most, by both · pmi; None if there is none.
        heights: share of co-occurrences in each bin of PMI (`EDGES`).
        null_heights: their means over shuffles.
    """

    layer: int
    distinct: int
    mean_pmi: float
    initial: float | None
    null: Float[np.ndarray, " shuffles"]
    aligned: float
    aligned_null: float
    coalition: Int[np.ndarray, " members"]
    top: TopPair | None
    heights: Float[np.ndarray, " bins"]
    null_heights: Float[np.ndarray, " bins"]

    @property
    def excess(self) -> float:
        """How far the mean PMI is above that of the shuffles, nats."""
        return self.mean_pmi - float(self.null.mean())


def measure_pairs(
    chosen: ExpertChoices,
    rng: np.random.Generator,
    budget: int = PAIRS,
    initial: ExpertChoices | None = None,
) -> LayerPairs:
    """Measure which experts of a layer are chosen together, now and before training.

    About `budget` co-occurrences are counted, of a random sample of tokens.
    """
    assert chosen.shape
    columns, most = chosen.shape[1], budget // max(1, math.comb(chosen.indices[0].size, 2))
    experts, ids = draw_tokens(chosen, most, rng)
    pairs, before = count_pairs(experts), None
    if initial is not None:
        before = count_pairs(draw_tokens(initial, len(experts), rng)[0]).mean_pmi
    chance = [count_pairs(shuffle_choices(experts, ids, rng)) for _ in range(SHUFFLES)]
    return LayerPairs(
        layer=chosen.layer,
        distinct=len(pairs.both),
        mean_pmi=pairs.mean_pmi,
        initial=before,
        null=np.array([one.mean_pmi for one in chance]),
        aligned=pairs.compute_aligned_share(columns),
        aligned_null=float(np.mean([one.compute_aligned_share(columns) for one in chance])),
        coalition=find_coalition(pairs),
        top=_find_top(pairs, columns),
        heights=pairs.bin_pmi(),
        null_heights=np.mean([one.bin_pmi() for one in chance], axis=0),
    )


def _find_top(pairs: ExpertPairs, columns: int) -> TopPair | None:
    excess = np.where(pairs.both >= OFTEN, pairs.both * pairs.pmi, 0.0)
    i = int(excess.argmax()) if excess.size else 0
    if not excess.any() or excess[i] <= 0:
        return None
    first, second = (divmod(int(of[i]), columns) for of in (pairs.first, pairs.second))
    return TopPair(first, second, int(pairs.both[i]), float(pairs.expected[i]))


@dataclass(frozen=True)
class CoActivation(Finding):
    """Which experts are chosen by the same token, in every layer."""

    layers: tuple[LayerPairs, ...]

    title = "Experts chosen by the same token · PMI of all pairs"
    reading = (
        "Each time one token chooses two experts, their PMI is counted once: the log of how many "
        "times more often the two meet than independent experts with their loads. Shuffled: each "
        f"choice is taken from another token id, {SHUFFLES} times; rare pairs are above 0 there, "
        "too, and the table has the largest mean. A key in common is the row's or the column's. A "
        "set is bound by pairs that at least half of the tokens with either expert choose both of."
    )

    @property
    def chance(self) -> float:
        """The largest excess of any layer in any shuffle, nats; NaN without pairs."""
        nulls = [layer.null for layer in self.layers if layer.distinct]
        return max((float(null.max() - null.mean()) for null in nulls), default=math.nan)

    @property
    def says(self) -> str:
        """Where experts are chosen together most, if beyond the shuffles of all layers."""
        layers = [layer for layer in self.layers if layer.distinct]
        if not layers:
            return "No token chooses two different experts: there are no pairs."
        most = max(layers, key=lambda layer: layer.excess)
        # Differences by rounding are not beyond chance.
        together = most.excess > max(self.chance + 1e-9, SLIGHT)
        verdict = "Experts are chosen together beyond chance, most in"
        if not together:
            verdict = "No layer is seen to choose experts together beyond chance; the nearest is"
        return (
            f"{verdict} layer {most.layer}, where the mean PMI is {most.mean_pmi:.3f} nats "
            f"(shuffled: at most {most.null.max():.3f})."
        )

    def numbers(self) -> Table:
        """Return the mean PMI of each layer beside its references, and the strongest pairs."""
        columns = (
            *("layer", "mean PMI (shuffled; before training)", "a key in common (shuffled)"),
            *("largest bound set", "strongest pair, met (expected)"),
        )
        rows = []
        for one in thin([layer for layer in self.layers if layer.distinct], TABLED):
            before = "–" if one.initial is None else f"{one.initial:.3f}"
            aligned = f"{percent(one.aligned)} ({percent(one.aligned_null)})"
            pair, top = "–", one.top
            if top is not None:
                pair = f"{top.first} and {top.second}, {top.both:,} ({top.expected:,.0f})"
            mean = f"{one.mean_pmi:.3f} ({one.null.max():.3f}; {before})"
            rows.append((str(one.layer), mean, aligned, str(len(one.coalition)), pair))
        return Table(columns, tuple(rows))

    def figure(self) -> go.Figure | None:
        """Draw a histogram of PMI for each layer, over that of shuffled choices."""
        layers = thin([layer for layer in self.layers if layer.distinct], TABLED)
        if not layers:
            return None
        every = np.stack([part for one in layers for part in (one.heights, one.null_heights)])
        filled = np.flatnonzero((every >= VISIBLE * every.max()).any(0))
        shown = slice(max(0, filled[0] - 1), filled[-1] + 3)
        panels = []
        for one in layers:
            parts = {"chosen together": one.heights[shown], "shuffled": one.null_heights[shown]}
            lines = [Line(name, EDGES[shown], y, shape="stairs") for name, y in parts.items()]
            y = Axis("share", "share", ends=(0, 1.05 * max(map(max, parts.values()))))
            height = min(180, 720 // len(layers))
            panels.append(Curves(lines, y, f"layer {one.layer}", height=height))
        return curves(panels, Axis("PMI of the pair, nats"))


def measure(subject: Subject) -> list[LoadMap | CoActivation]:
    """Map the load of each layer with product-key experts, then measure their co-activation.

    Raises:
        NotApplicableError: for a model without such a layer.
    """
    found = collect_choices(subject.model, subject.batch)
    initial = None
    if subject.run is not None:
        batch = subject.batch[: math.ceil(INITIAL / subject.task.seq_len)]
        initial = collect_choices(subject.run.build().eval().to(batch.inputs.device), batch)
    rng = np.random.default_rng(subject.seed)
    maps = [map_load(layer, rng) for layer in found]
    return [*maps, measure_co_activation(found, rng, initial)]


def measure_co_activation(
    found: Sequence[ExpertChoices],
    rng: np.random.Generator,
    initial: Sequence[ExpertChoices] | None = None,
) -> CoActivation:
    """Measure which experts are chosen by the same token, now and before training, by layer."""
    budget = max(FEWEST_PAIRS, PAIRS // len(found))
    before = initial or [None] * len(found)
    pairs = [measure_pairs(one, rng, budget, old) for one, old in zip(found, before, strict=True)]
    return CoActivation(tuple(pairs))

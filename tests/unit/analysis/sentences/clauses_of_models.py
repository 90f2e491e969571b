"""Clauses of words about layers, heads, values and components, each with and without."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
from analysis.mechanism.components import Components
from analysis.mechanism.cues import Measured
from analysis.mechanism.label import Mechanism
from analysis.recall.by_place import RecallByPlace
from analysis.recall.pair_mass import PairMass
from analysis.state_space.magnitudes import Magnitudes
from analysis.statistics.binned import Bins
from analysis.value_usage.uses import ValueUses

from analysis.links import AnswerLinks
from analysis.matrices.layer_matrix import LayerMatrix
from analysis.matrices.rollout import Rollout
from analysis.mechanism.effects import Restored
from analysis.plots.heatmaps import Heatmap, Picture
from analysis.value_usage.swaps import Swap, Swaps
from tests.unit.analysis.sentences import of_models, of_runs
from tests.unit.analysis.sentences.clauses import Clause, heads, signed
from tests.unit.analysis.sentences.of_models import contexts, estimate, memory, reach, spectrum


def widen(finding: Any, count: int, **axes: int) -> Any:
    """Return a finding of this many heads, which repeat its own, along these axes."""
    places = np.arange(count)
    wide = {
        name: np.take(getattr(finding, name), places, axis=axis, mode="wrap")
        for name, axis in {"layers": 0, **axes}.items()
    }
    return replace(finding, heads=places, **wide)


def one(finding: Any, **axes: int) -> Any:
    """Return a finding of its first head alone."""
    return widen(finding, 1, **axes)


def magnitudes(pool: int = 1, below: float = 0.0) -> Magnitudes:
    found = of_models.magnitudes(0.0, -2.0)
    shown: Any = of_models.layer(1, 0.2, 0.2)._build_heatmap()
    shown = replace(shown, picture=replace(shown.picture, pool=pool))
    return replace(found, below=below, shown=shown)


def crop(first: int) -> LayerMatrix:
    """Return a crop of 8 × 8 entries whose queries at 4 and 6 ask for the values at 1 and 3."""
    whole = of_models.layer(1, 0.2, 0.2)
    assert whole.picture is not None
    return replace(whole, cropped=True, picture=replace(whole.picture, first=(first, first)))


def ringed(rings: int, heads: int = 1) -> LayerMatrix:
    """Return a layer of some heads with this many queries."""
    whole = of_models.layer(1, 0.2, 0.2)
    places = np.arange(rings)
    return replace(
        whole,
        picture=Picture(np.stack([np.tri(rings)] * heads)),
        links=AnswerLinks(places, places, places),
    )


def rollout(
    value: float, ends: tuple[float, float], *, pairs: bool = True, rows: int = 4, pool: int = 1
) -> Rollout:
    """Return what two layers bring to queries from their values; uniform ones bring a tenth."""
    none = np.zeros(0, int)
    links = AnswerLinks(none, none, none)
    shown = Heatmap(
        Picture(np.tri(8)[None], pool), links, np.zeros(8, int), np.zeros(8, int), ("key",)
    )
    found = np.array([value] * (rows if pairs else 0))
    return Rollout(2, found, ends, 0.1, np.array([0.3]), 0.4, rows, shown)


def components(*low: float, n_layers: int | None = None) -> Components:
    """Return mixers of layers that restore the answer at the keys, by low end of the interval."""
    n = len(low)
    share, ends = np.zeros((n, 4)), np.zeros((n, 4, 2))
    share[:, 0], ends[:, 0, 0], ends[:, 0, 1] = np.array(low) + 0.1, low, np.array(low) + 0.2
    return Components(np.arange(n), ("mixer",) * n, share, ends, 8, 16, n_layers or n)


def mechanism(label: str, *evidence: tuple[str, float], inner: int = 1) -> Mechanism:
    """Return a label that rests on these numbers, of a model with blocks between its ends."""
    found = tuple(Measured(name, value, (value - 0.1, value + 0.1)) for name, value in evidence)
    share = np.zeros((5, inner + 2))
    restored = Restored(np.arange(inner + 2), share, np.stack([share, share], -1), 8, 16)
    key, position = (Measured("", value, (value, value)) for value in (0.7, 0.2))
    return Mechanism(label, "this is why", found, key, position, restored, 8)


def bins(*first: int) -> Bins:
    n, at = len(first), np.array(first)
    return Bins(at, at, np.full(n, 0.5), np.array([[0.4, 0.6]] * n), np.full(n, 9))


def recall(split: str = "test", rows: int = 8, decoy: Bins | None = None) -> RecallByPlace:
    return RecallByPlace(split, rows, 0.5, (0.4, 0.6), 0.1, bins(1, 2), None, decoy)


def pair_mass(*on_value: float, rows: int = 4, key: float = 0.1) -> PairMass:
    """Return heads of layer 0 by their mass on values; a uniform row has a tenth."""
    n = len(on_value)
    share = np.stack([np.array(on_value), np.full(n, key), np.full(n, 0.1)], 1)
    ends = np.stack([share - 0.05, share + 0.05], -1)
    chance = np.full(3, 0.1)
    mixers = ("Attention",) * n
    return PairMass(np.zeros(n, int), np.arange(n), mixers, share, ends, chance, rows, ())


def swaps(*found: tuple[int, int | None, float], placebo: float = 0.0) -> Swaps:
    """Return surely costly swaps by layer, value and change; no value is a shuffle."""
    made = tuple(
        Swap(layer, value, None, 0.5, estimate(change, 0.0), 0.01) for layer, value, change in found
    )
    return Swaps(estimate(0.9), made, placebo, ("key",), 5, False)


def usage(layers: int, margin: float = 0.1) -> ValueUses:
    [found] = of_runs.usage(3, 0.5, 0.1).layers
    return ValueUses((replace(found, margins=np.full(5, margin)),) * layers, ("key",))


WRITES = of_models.writes(1, 4)
CONTEXT = contexts(4, 15)
MEMORY = memory((2, 8), (3, 9))
SPECTRUM = spectrum((2, 7), (3, 8))
REACH = reach((2, 8), (1, 3))
ACROSS: Any = {"entropy": 0, "effective_keys": 0, "distance": 0}
LIVES: Any = dict.fromkeys(("half_life", "context", "decay", "content", "covariance"), 0)
SPLITS: Any = dict.fromkeys(("bound", "rank", "effective_rank", "initial_effective_rank"), 1)
SCORES = heads(0.9)
NO_ENDS = math.nan, math.nan
TIED = rollout(0.5, (0.4, 0.6), pairs=False)
RESTORED = ("value restored after block 0", 0.9), ("placebo restored after block 0", 0.05)
LITTLE = ("value restored after block 0", 0.12), ("placebo restored after block 0", 0.05)
EXCHANGED = ("left with values exchanged", 0.04), ("left with other positions exchanged", 0.96)
INDUCTION, DIRECT = mechanism("induction", *RESTORED), mechanism("direct", *LITTLE)
ONE_BLOCK = mechanism("direct", *EXCHANGED)
SHARE = "Heads of a layer share a line."
HISTORY = of_runs.history([1, 3, 2], 4, zero_keys=False)
CHURN = np.full((3, 2), math.nan)
CLAUSES = [
    Clause(widen(WRITES, 25, means=2), widen(WRITES, 24, means=2), SHARE),
    Clause(
        widen(CONTEXT, 7, context_at=0), widen(CONTEXT, 6, context_at=0), "at the end are named"
    ),
    Clause(contexts(4, 4), one(contexts(4, 4), context_at=0), ", in every head"),
    Clause(magnitudes(pool=2), magnitudes(), ", max over "),
    Clause(magnitudes(below=0.25), magnitudes(), "; 25.0 % are below the floor of the colours."),
    Clause(replace(MEMORY, initial=MEMORY), MEMORY, "Diamonds are the run's weights at step 0."),
    Clause(memory((2, math.inf), (3, 9)), MEMORY, "Heads without decay have no dot"),
    Clause(
        memory((2, math.inf), (3, 9)), memory((math.inf, math.inf), (3, 9)), "decay have no dot"
    ),
    Clause(widen(MEMORY, 25, **LIVES), widen(MEMORY, 24, **LIVES), SHARE),
    Clause(MEMORY, memory((2, 8), (3, 3)), "context is 9 tokens (head 0.1), compared"),
    Clause(one(MEMORY, **LIVES), MEMORY, "its effective context is 3 tokens, compared"),
    Clause(widen(SPECTRUM, 7, **SPLITS), widen(SPECTRUM, 6, **SPLITS), "effective rank are named"),
    Clause(widen(REACH, 25, **ACROSS), widen(REACH, 24, **ACROSS), SHARE),
    Clause(heads(*[0.2] * 25), heads(*[0.2] * 24), SHARE),
    Clause(replace(SCORES, chance=np.array([math.nan])), SCORES, "there is no previous token."),
    Clause(signed(pool=2), signed(), ", signed max over "),
    Clause(ringed(8), ringed(8, heads=2), "A, 1 head, lower triangle"),
    Clause(ringed(8, heads=2), ringed(8), "A, 2 heads, lower triangle"),
    Clause(ringed(97), ringed(96), "There are many rings: click"),
    Clause(crop(0), crop(2), "columns 0 to 7 hold 2 of the 2 cells where a query meets"),
    Clause(crop(4), crop(0), "Rows 4 to 11, columns 4 to 11; each cell is one entry"),
    Clause(rollout(0.5, (0.4, 0.6), pool=2), rollout(0.5, (0.4, 0.6)), ", max over 2 × 2"),
    Clause(rollout(0.5, (0.4, 0.6)), rollout(0.5, (0.4, 0.6), pool=2), "first test row, lower"),
    Clause(rollout(0.5, NO_ENDS, rows=1), rollout(0.5, (0.4, 0.6)), "means over 1 row of"),
    Clause(of_models.sweep(0.01), of_models.sweep(0.0099), "restores most: 0.01 of the"),
    Clause(rollout(0.5, (0.4, 0.6)), TIED, "rings where a query meets its value"),
    Clause(rollout(0.5, NO_ENDS, rows=1), rollout(0.5, (0.4, 0.6)), "50.0 % (one row;"),
    Clause(rollout(0.5, (0.2, 0.8)), rollout(0.5, (0.19, 0.8)), "both layers queries reach the"),
    Clause(rollout(0.2, (0.1, 0.2)), rollout(0.1, (0.1, 0.19)), "It is uncertain whether recall"),
    Clause(components(0.5), components(0.2), "Layer 0's mixer at the keys restores more than a"),
    Clause(components(0.5), components(0.2), "more than a third of the answer alone: layer 0's"),
    Clause(components(0.2), components(0.5), "No single component surely restores a third"),
    Clause(components(0.6, 0.5), components(0.6), "each restore more than a third"),
    Clause(components(*[0.5] * 5), components(*[0.5] * 4), "; and 1 more."),
    Clause(components(*[0.5] * 5), components(*[0.5] * 4), ", and 1 more each restore"),
    Clause(components(*[0.5] * 4), components(*[0.5] * 5), "placebo 0.00). Corrupt rows are"),
    Clause(components(*[0.5] * 4), components(*[0.5] * 5), "at the keys each restore more than"),
    Clause(components(0.5, n_layers=2), components(0.5), "Some of the 2 layers are left out."),
    Clause(components(0.5), components(0.5, n_layers=2), "appears here by itself. Heat map of"),
    Clause(INDUCTION, DIRECT, "by values 0.90 (0.80 to 1.00), as many others 0.05; "),
    Clause(INDUCTION, DIRECT, "alone brings back 90 % of the answer."),
    # The best depth decides: at others it is less, and not all depths are tried in deep models.
    Clause(DIRECT, INDUCTION, "brings back at most 12 % of the answer at the depths tried."),
    Clause(ONE_BLOCK, DIRECT, "Exchanging two values leaves 4 % of the answer."),
    Clause(ONE_BLOCK, DIRECT, "Share of the answer left with values exchanged 0.04 (-0.06 to"),
    Clause(mechanism("positional"), DIRECT, "It answers by position, not by key. When two keys"),
    Clause(mechanism("mixed"), mechanism("undecided"), "more than one way: this is why."),
    Clause(mechanism("undecided"), mechanism("mixed"), "Not decided: this is why."),
    Clause(recall(rows=1), recall(), "test split, 1 row "),
    Clause(recall("probe"), recall(), "On the probe split a query's slot is independent"),
    Clause(recall(decoy=bins(0, 1)), recall(decoy=bins(0)), "without a decoy before the query 50"),
    Clause(recall(decoy=bins(0)), recall(decoy=bins(1)), "no query has a decoy before it."),
    Clause(recall(decoy=bins(1)), recall(decoy=bins(0)), "every query has a decoy before it."),
    Clause(pair_mass(0.9, rows=1), pair_mass(0.9), "means over 1 row "),
    Clause(pair_mass(0.9, 0.1), pair_mass(0.1, 0.2), "Heads look at their pair: at most, query"),
    Clause(pair_mass(0.1, 0.2), pair_mass(0.9, 0.1), "No head clearly looks at its pair"),
    Clause(pair_mass(0.9, 0.1), pair_mass(0.1, key=0.9), "Queries put up to 90.0 % (head 0.0;"),
    Clause(HISTORY, of_runs.history([2, 1, 1], 4, zero_keys=False), "are used by step 1;"),
    Clause(HISTORY, of_runs.history([2, 1, 1], 4, zero_keys=False), "; more than at first"),
    Clause(
        of_runs.history([1, 2], 7, zero_keys=False),
        of_runs.history([1, 2], 6, zero_keys=False),
        "The 6 values with the highest share at any step are shown.",
    ),
    Clause(replace(HISTORY, churn_interval=CHURN), HISTORY, "(one row: no interval; shuffled"),
    Clause(HISTORY, replace(HISTORY, churn_interval=CHURN), "([10.0 %, 10.0 %]; shuffled"),
    Clause(
        swaps((0, None, -0.2)), swaps((0, None, -0.2), placebo=0.5), "own choice changes nothing."
    ),
    Clause(
        swaps((0, None, -0.1), (1, None, -0.3), (1, 2, -0.4)),
        swaps((0, None, -0.1), (1, None, -0.3)),
        "shuffling the layer's choices changes it by -30.0 points",
    ),
    Clause(usage(1), usage(1, math.nan), "median margin 0.1, ties 0.0 %"),
    Clause(usage(5), usage(4), " layers are shown."),
]

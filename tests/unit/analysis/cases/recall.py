"""Mass on pairs and recall by place: planted by hand."""

import math

import numpy as np

from analysis.links import Offsets
from analysis.recall import PairMass, RecallByPlace
from analysis.statistics.comparisons import Bins
from tests.unit.analysis.case import Case


def pair_mass(
    *on_value: float, half: float = 0.05, without: tuple[int, ...] = (), later: int = 0
) -> PairMass:
    """Return heads of layer 0 by their mass on values; a uniform row has a tenth."""
    n = len(on_value)
    share = np.stack([np.array(on_value), np.full(n, 0.1), np.full(n, 0.1)], 1)
    ends = np.stack([share - half, share + half], -1)
    offsets = Offsets({0: later}, {0: later}) if later else Offsets()
    heads = np.zeros(n, int), np.arange(n)
    return PairMass(*heads, share, ends, np.full(3, 0.1), without, offsets)


def bins(*shares: float, half: float = 0.05) -> Bins:
    accuracy, first = np.array(shares), np.arange(len(shares))
    interval = np.stack([accuracy - half, accuracy + half], 1)
    return Bins(first, first, accuracy, interval, np.full(len(shares), 50))


def recall(distance: Bins, decoy: Bins | None = None) -> RecallByPlace:
    interval = 0.65, 0.75
    return RecallByPlace("probe", 8, 0.7, interval, 0.01, distance, bins(0.7, 0.7), decoy)


CASES = [
    Case(
        "planted", pair_mass(0.9, 0.1), "Heads look at their pair: query rows put up to 90.0 % (h"
    ),
    Case("planted", pair_mass(0.9, 0.1), "query → value head 0.0 90.0 % 85.0 % to 95.0 % 10.0 %"),
    Case("planted", pair_mass(0.9, later=2), "on what lies two positions after the value they ask"),
    Case("planted", pair_mass(0.9, later=2), "uniform row: below 10.0 %) on its key"),
    Case("null", pair_mass(0.1, 0.1), "No head clearly looks at its pair: query", "Heads look"),
    Case("boundary", pair_mass(0.37), "No head clearly looks at its pair: query", "Heads look"),
    Case("boundary", pair_mass(0.9, half=math.nan), "No head clearly looks at its", "Heads look"),
    Case("boundary", pair_mass(0.9, without=(1, 2)), "no matrix layers 1, 2"),
    Case("planted", recall(bins(0.9, 0.4)), "90.0 % at distance 0 against 40.0 % at distance 1."),
    Case("planted", recall(bins(0.7), bins(0.9, 0.5)), "a decoy before the query 50.0 % (45.0 %"),
    Case("null", recall(bins(0.7, 0.7)), "no distance stands out", "against"),
    Case("boundary", recall(bins(0.9, 0.4, half=0.4)), "no distance stands out", "against"),
    Case("boundary", recall(bins(0.7), bins(0.7)), "no decoy before the query 70.0 %", "a decoy"),
]

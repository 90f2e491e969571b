"""Findings about dynamic masks."""

import math

import numpy as np

from analysis.dynamic_mask import Beyond, KeptByPosition, KeySelection, MaskEffect
from analysis.dynamic_mask.learning import BiasValues, MaskHistory, MaskTrajectory
from analysis.dynamic_mask.masks import BANDS, MaskedHead, StoredPairs
from lab.intervals import Estimate
from tests.unit.analysis.case import Case


def estimate(value: float, chance: float = 0.5, half: float = 0.1) -> Estimate:
    return Estimate(value, value - half, value + half, chance)


def head(
    kept: tuple[float, float], auroc: Estimate | None = None, gained: float = 0.3
) -> MaskedHead:
    """Return a head by the share of keys that it keeps in both halves of a row."""
    same, change, pairs = estimate(0.5), estimate(gained, 0.0), None
    if auroc is not None:
        pairs = StoredPairs(same, same, auroc, same, same, same, same, change, same, same, 0.2)
    mean = float(np.mean(kept))
    share, by_band = np.array([mean]), np.array([np.repeat(kept, BANDS // 2)])
    lost = estimate(0.0, 0.0)
    return MaskedHead(0, 0, 1, "table", 0.5, mean, share, by_band, share, lost, 0.3, pairs)


def biases(lightest: float, gradient: float = 1.0) -> BiasValues:
    names, by_role = ("layer 0",), np.array([[-1.0, 0.0]])
    blank, roles = np.zeros((1, 2, 1)), ("key", "value")
    return BiasValues(names, ("table",), roles, by_role, (lightest,), (gradient,), 1, blank, blank)


def selection(*kept: float, auroc: Estimate | None = None) -> KeySelection:
    return KeySelection(tuple(head((share, share), auroc) for share in kept), ("key",))


def by_position(first: float, second: float) -> KeptByPosition:
    return KeptByPosition(("key",), tuple(range(0, 17, 2)), (head((first, second)),))


def effect(
    removal: Estimate, p: float, beyond: Beyond | None = None, gained: float = 0.0
) -> MaskEffect:
    heads = (head((0.2, 0.4), estimate(0.5), gained),)
    return MaskEffect(estimate(0.5), (0,), (removal,), (p,), beyond or UNSEEN, heads)


def trajectory(*last: float) -> MaskTrajectory:
    """Return two heads whose tables begin at 1, and of which the first ends so, by band."""
    by_band = np.ones((2, 2, len(last)))
    by_band[1, 0] = last
    return MaskTrajectory(("head 0", "head 1"), True, np.array([0, 9]), by_band, 1, by_band)


def history(drift: float, gradient: float) -> MaskHistory:
    both = np.array([[gradient], [gradient]]), np.array([[0.0], [drift]])
    return MaskHistory(np.array([0, 9]), (0,), ("table",), *both)


ONE_ROW = Estimate(0.5, math.nan, math.nan, 0.5)
FAR = Beyond(8, 0.5, 0.2, 32, estimate(0.9), (0.75,), "")
UNSEEN = Beyond(0, math.nan, math.nan, 32, None, (), "no rows")
LESS = estimate(0.4, 0.0)
CASES = [
    Case("planted", biases(0.1), "The table mask of layer 0 acts most strongly"),
    Case("null", biases(1.0, gradient=0.0), "no gradient reaches: 1 of 1", "strongly"),
    # A window still masks where all biases are equal.
    Case("boundary", biases(1.0), "No bias acts, as all keys have the same one", "no mask"),
    Case("boundary", biases(0.5, gradient=math.nan), "no gradient reaches: 0 of 0"),
    Case("planted", selection(0.2, 1.0), "Heads that mask keys: 1 of 2; layer 0 keeps fewest"),
    Case("null", selection(1.0, 1.0), "No head masks any key.", "fewest"),
    Case("planted", selection(0.5, auroc=estimate(0.9)), "0.900 [0.800, 1.000]"),
    Case("null", selection(0.5, auroc=estimate(0.5)), "0.500 [0.400, 0.600]"),
    Case("boundary", selection(0.5, auroc=ONE_ROW), "0.500 [one row: no interval]"),
    Case("planted", by_position(0.2, 0.8), "from 20.0 % (key at 0–1) to 80.0 % (key at 8–9)"),
    Case("null", by_position(0.5, 0.5), "from 50.0 % (key at 0–1) to 50.0 %"),
    Case("boundary", by_position(math.nan, 0.5), "from 50.0 % (key at 8–9)"),
    Case("planted", effect(LESS, 0.001), "layers whose mask does harm: 1 of 1"),
    Case("null", effect(estimate(0.0, 0.0), 0.5), "by +0.0 points [-10.0, +10.0]; layers whose"),
    Case("boundary", effect(ONE_ROW, 1.0), "[one row: no interval]; layers whose mask does"),
    Case("planted", effect(LESS, 1.0, FAR), "rows of 32 tokens, AUROC of the biases 0.75"),
    Case("boundary", effect(LESS, 1.0), "rows of 32 tokens not measured no rows", "entries"),
    Case("planted", effect(LESS, 1.0, gained=-0.3), "or from a value to its key: 1 of 1."),
    # The interval holds 0.
    Case("boundary", effect(LESS, 1.0, gained=-0.05), "or from a value to its key: 0 of 1."),
    Case("planted", trajectory(0.2, 0.9), "from 0.2 (band 1) to 0.9 (band 2 of 2)"),
    Case("null", trajectory(1, 1), "No value ever changes.", "most"),
    Case("boundary", trajectory(0.4, 0.4), "from 0.4 (band 1) to 0.4"),
    Case("planted", history(0.5, 0.1), "The mask of layer 0 moves furthest, by 0.5"),
    Case("null", history(0.0, 0.0), "gradient is 0 at every step: 1 of 1", "furthest"),
    Case("boundary", history(0.0, 0.1), "No mask has moved between the first", "furthest"),
]

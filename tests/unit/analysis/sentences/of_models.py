"""Findings of layers, frequencies, patches and masks, planted by hand, with their words."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from analysis.dynamic_mask.biases import BiasValues
from analysis.dynamic_mask.history import MaskHistory
from analysis.dynamic_mask.kept_by_position import KeptByPosition
from analysis.dynamic_mask.selection import KeySelection
from analysis.dynamic_mask.trajectory import MaskTrajectory
from analysis.frequencies.bands import BandAblation, BandAblations
from analysis.frequencies.energies import Energies, FrequencySpectrum
from analysis.frequencies.uses import FrequencyUse, FrequencyUses
from analysis.matrices.head_reach import HeadReach
from analysis.mechanism.edits import Edited
from analysis.patching.edge_effects import EdgeEffects
from analysis.state_space.contexts import Contexts
from analysis.state_space.magnitudes import LEAST, Magnitudes
from analysis.state_space.memory import StateMemory
from analysis.state_space.role_means import QUANTITIES, RoleMeans
from analysis.state_space.spectrum import StateSpectrum
from analysis.statistics.estimates import Estimate

from analysis.base import Finding
from analysis.dynamic_mask.effect import MaskEffect
from analysis.dynamic_mask.masks import MaskedHead, StoredPairs
from analysis.links import AnswerLinks, Mass
from analysis.matrices.layer_matrix import LayerMatrix
from analysis.patching.sweeps import PatchSweep
from analysis.plots.heatmaps import Picture


class Case(NamedTuple):
    """A finding, what it is (planted, null or boundary), and what its words have and lack."""

    kind: str
    finding: Finding
    has: str
    lacks: str = "nan"


HEADS = np.zeros(2, int), np.arange(2)


def writes(*means: float) -> RoleMeans:
    by_role = np.ones((4, len(means), 1))
    by_role[2, :, 0] = means
    one = np.zeros(1, int)
    return RoleMeans(one, one, ("key", "value", "filler")[: len(means)], QUANTITIES, by_role, 4)


def magnitudes(largest: float, median: float) -> Magnitudes:
    shown: Any = SimpleNamespace(picture=SimpleNamespace(pool=1))
    return Magnitudes(0, largest, largest - 1, median, 0.0, shown)


def memory(half_lives: tuple[float, float], contexts: tuple[float, float]) -> StateMemory:
    third = np.full(2, 1 / 3)
    lives, windows = np.array(half_lives), np.array(contexts)
    return StateMemory(*HEADS, lives, windows, third, third, third, 9.0, 4, None)


def contexts(*last: float) -> Contexts:
    return Contexts(*HEADS, np.array([15]), np.array(last)[:, None], np.array([15.0]), 4)


def spectrum(effective: tuple[float, float], rank: tuple[float, float]) -> StateSpectrum:
    cut, none = np.array([8]), np.full((1, 2), math.nan)
    bound, given = np.full((1, 2), 8), np.array([effective])
    return StateSpectrum(*HEADS, cut, bound, np.array([rank]), given, none, 4, np.ones((2, 8)))


def reach(keys: tuple[float, float], distance: tuple[float, float]) -> HeadReach:
    both = np.array(keys), np.array(distance)
    return HeadReach(*HEADS, ("Attention",) * 2, np.log(both[0]), *both, 1.0, 8.5, 3.75, 4)


def layer(on_value: float, written: float, uniform: float) -> LayerMatrix:
    ends = np.array([on_value]), np.zeros(1), np.array([written]), np.zeros(1)
    mass = Mass(*ends, uniform_value=uniform, uniform_written=uniform, uniform_previous=uniform)
    two = np.array([0, 2])
    links = AnswerLinks(two + 4, two, two + 1)
    picture = Picture(np.tri(8)[None], 1, (0, 0), 1.0, signed=False)
    tokens = np.zeros(8, int)
    return LayerMatrix(0, "Attention", "A", picture, mass, False, links, tokens, tokens, ("key",))


def pairless(*on_previous: float) -> LayerMatrix:
    """Return a layer without pairs, by its heads' mass on the token before, if there is one."""
    none, heads = np.zeros(0), np.array(on_previous)
    mass = Mass(none, none, none, heads, uniform_value=0, uniform_written=0, uniform_previous=0.3)
    empty = np.zeros(0, int)
    links = AnswerLinks(empty, empty, empty)
    return replace(layer(0, 0, 0), mass=mass, links=links)


def edges(*effects: float, method: str = "patched one by one") -> EdgeEffects:
    names = tuple(f"L0H{i}" for i in range(len(effects)))
    return EdgeEffects(names, ("logits",), np.array(effects)[:, None], 1.0, 0.0, method)


def sweep(*metric: float, clean: float = 1.0) -> PatchSweep:
    labels = tuple(map(str, range(len(metric))))
    return PatchSweep("z", "head", np.zeros(1, int), np.array([metric]), clean, 0.0, labels)


def spectra(long: float, uniform: float, layers: int = 1) -> Energies:
    waves, even = np.array([6.0, 60.0]), np.full((1, 2), 0.5)
    one = FrequencySpectrum(
        0, "Q/K", np.zeros(1, int), waves, even, np.ones(1), np.array([long]), uniform, even
    )
    return Energies(tuple(replace(one, layer=i) for i in range(layers)), 16)


def bands(change: float, accuracy: float = 0.9) -> BandAblations:
    ends = change - 0.05, change + 0.05
    band = BandAblation(0, "Q/K", "fast", (0, 2), (6.0, 9.0), change, ends, np.full(19, -0.1))
    return BandAblations((band,), accuracy, (accuracy - 0.05, accuracy + 0.05), 0.06, 50)


def uses(advantages: np.ndarray, error: float = 1.0) -> FrequencyUses:
    """Return one kind of edge in layers of some heads, by advantage [layer, head]."""
    found = []
    for number, ours in enumerate(advantages):
        best = int(np.abs(ours).argmax())
        ends = ours[best] - 1.96 * error, ours[best] + 1.96 * error
        waves, zero = np.array([6.0, 60.0]), np.zeros(len(ours))
        by_pair = np.stack([ours, zero], 1)
        use = FrequencyUse(
            number,
            "Q/K",
            "query → value",
            9,
            3.0,
            waves,
            ours,
            best,
            ends,
            ours,
            by_pair,
            zero,
            0.5,
        )
        found.append(use)
    return FrequencyUses(tuple(found), 16)


def edited(left: tuple[float, float], half: tuple[float, float] = (0.1, 0.1)) -> Edited:
    """Return two layers, of whose margin blocking either kind of edge leaves this much."""
    blocked, placebo = np.array([left, left, left]), np.ones((3, 2))
    reach = np.array([half] * 3), np.full((3, 2), 0.1)
    ends = [
        np.stack([part - to, part + to], 2)
        for part, to in zip((blocked, placebo), reach, strict=True)
    ]
    moved = np.zeros(2)
    return Edited(np.arange(2), blocked, ends[0], placebo, ends[1], moved, np.zeros(2), 8)


def estimate(value: float, chance: float = 0.5, half: float = 0.1) -> Estimate:
    return Estimate(value, value - half, value + half, chance)


def masked(kept: tuple[float, float], auroc: Estimate | None = None) -> MaskedHead:
    """Return a head by the share of keys that it keeps in both halves of a row."""
    pairs = None
    if auroc is not None:
        same = estimate(0.5)
        pairs = StoredPairs(
            same, same, auroc, same, same, same, same, estimate(0, 0), same, same, 0.2
        )
    share, by_band = np.array([np.mean(kept)]), np.array([kept])
    mean = float(share[0])
    lost = estimate(0.0, 0.0)
    return MaskedHead(0, 0, 1, "table", None, 0.5, mean, share, by_band, share, lost, 0.5, pairs)


def selection(auroc: Estimate) -> KeySelection:
    return KeySelection((masked((0.2, 0.4), auroc),), ("key",))


def kept(*shares: float) -> KeptByPosition:
    return KeptByPosition(("key",), (0, 8, 16), (masked((shares[0], shares[1])),))


def effect(removal: Estimate, p: float) -> MaskEffect:
    beyond: Any = SimpleNamespace(summarize=lambda: "")
    heads = (replace(masked((0.2, 0.4)), moved=0.3),)
    return MaskEffect(estimate(0.5), (0,), (removal,), (p,), beyond, heads)


def moved(drift: float, gradient: float) -> MaskHistory:
    both = np.array([[gradient], [gradient]]), np.array([[0.0], [drift]])
    values = np.zeros((2, 1, 4))
    return MaskHistory(np.array([0, 9]), (0,), (1,), ("table",), (True,), *both, values)


def trajectory(*last: float) -> MaskTrajectory:
    """Return two heads whose tables begin at 1, and of which the first ends so, by band."""
    by_band = np.ones((2, 2, len(last)))
    by_band[1, 0] = last
    return MaskTrajectory(("head 0", "head 1"), True, np.array([0, 9]), by_band, 1, by_band)


def biases(lightest: float, gradient: float = 1.0) -> BiasValues:
    by_role, blank = np.array([[-1.0, 0.0]]), np.zeros((1, 2, 1))
    names = ("layer 0",), ("table",), ("key", "value")
    return BiasValues(*names, by_role, (lightest,), (0,), (gradient,), 1, blank, blank)


NO_ROWS = Estimate(0.5, math.nan, math.nan, 0.5)
NO_MASS = math.nan, math.nan
ZERO = float(np.log10(LEAST))
OTHERS = "Head 0.0 is the sharpest with 2 effective keys, 0.1 the widest with 8"
CASES = [
    Case("planted", writes(1, 4), "writes 4 times as much at value tokens as at key ones"),
    Case("null", writes(0, 0), "No head distinguishes roles", "times"),
    Case("boundary", writes(2, 2, 2), "writes as much at the tokens of every role", "times"),
    Case("boundary", writes(0, 4), "writes something at value tokens and nothing at key ones"),
    Case("boundary", writes(2, 3), "Head 0.0 writes 1.5 times as much"),
    Case("planted", magnitudes(0.0, -2.0), "Half of the entries lie 2 decades or more below"),
    Case("null", magnitudes(ZERO, ZERO), "All entries are 0.", "largest"),
    Case("boundary", magnitudes(0.0, 0.0), "At least half of the entries are as large", "decades"),
    Case("planted", memory((2, 8), (3, 9)), "to 8 tokens (head 0.1); the widest effective"),
    Case("null", memory((5, 5), (3, 3)), "of all heads is 5 tokens; every head's", "widest"),
    Case("boundary", memory((5, 5.0001), (3, 3.0001)), "of all heads is 5 tokens", "go from"),
    Case("boundary", memory((math.inf, math.inf), (3, 9)), "No head forgets: there is no decay"),
    Case("planted", contexts(4, 15), "the latest 4 (head 0.0) to 15 tokens (head 0.1)"),
    Case("null", contexts(13.5, 13.5), "the latest 13.5 tokens, in every head,", "head 0.0"),
    Case("boundary", contexts(4, 4.001), "the latest 4 tokens, in every head,"),
    Case("planted", spectrum((2, 7), (3, 8)), "2 of at most 8 (head 0.0) to 7 of at most 8"),
    Case("null", spectrum((5, 5), (8, 8)), "of every head is 5 of at most 8", "go from"),
    Case("null", spectrum(NO_MASS, (0, 0)), "nothing is carried: all entries", "rank"),
    Case("boundary", spectrum((2, math.nan), (3, 0)), "without 1 head that carries nothing;"),
    Case("boundary", spectrum((2, 7), (3, 7.6)), "is full in 0 of 2 heads in every row"),
    Case("planted", reach((2, 8), (1, 3)), f"{OTHERS} (uniform rows 8.5); mean distances go"),
    Case("null", reach((8.5, 8.5), (3.75, 3.75)), "Every head spreads over 8.5", "sharpest"),
    Case("null", reach(NO_MASS, NO_MASS), "No head has any mass.", "sharpest"),
    Case("boundary", reach((2, math.nan), (3, math.nan)), "Head 0.0 spreads over 2 effective keys"),
    Case("boundary", reach((2, 8), (3.75, 3.75)), "the mean distance of each is 3.75", "go from"),
    Case("planted", layer(1, 0.2, 0.2), "It recalls. Query rows put 100.0 %"),
    Case("null", layer(0.2, 0.2, 0.2), "It shows neither recall nor binding."),
    # Of two pairs, uniform value rows have 37.5 % on their keys: most of the mass may lie there.
    Case("boundary", layer(0.1, 0.52, 0.375), "neither recall nor binding", "Most of the mass"),
    Case("boundary", pairless(), "A single token.", "mass"),
    Case("planted", pairless(0.9, 0.2), "Of a row's mass 90.0 % (head 0.0; uniform: 30.0 %) lies"),
    Case("planted", edges(0.1, -0.8), "Of 2 edges, L0H1 → logits changes the metric most: by -0.8"),
    Case(
        "planted", edges(0.1, 0.8, method="estimated from the gradient"), "is estimated to change"
    ),
    Case("null", edges(0, 0), "None of 2 edges changes the metric", "most"),
    Case("boundary", edges(0.5, -0.5), "changes the metric most, as does 1 more"),
    Case("planted", sweep(0.1, 0.9), "Head 0.1 restores most: 0.90 of the difference"),
    Case("null", sweep(0.0, -0.2), "No layer and head restores a hundredth", "most"),
    Case("null", sweep(0.0, 0.0, clean=0.0), "there is nothing to restore", "most"),
    Case("boundary", sweep(0.9, 0.9, 0.9), "the runs, as do 2 more."),
    Case("planted", spectra(0.9, 0.5), "longer than the row, which can carry content, carry more"),
    Case("planted", spectra(0.9, 0.5, layers=2), "their share in Q/K of layers 0, 1."),
    Case("null", spectra(0.5, 0.5), "No layer leans to long or to short wavelengths"),
    Case("boundary", spectra(0.0, 0.0), "No layer has wavelengths both", "leans"),
    Case("null", spectra(math.nan, 0.5), "longer than the row: layer 0 (Q/K) has none."),
    Case("boundary", spectra(0.6, 0.5), "No layer leans", "carry more"),
    Case("planted", bands(-0.5), "and by -10.0 at most without one of 19 random thirds"),
    Case("null", bands(-0.05), "No third is shown to cost more than random thirds"),
    Case("boundary", bands(-0.1), "No third is shown to cost more than random thirds"),
    Case("boundary", bands(-0.5, accuracy=0.1), "not shown to be above chance", "third of Q/K"),
    Case("planted", uses(np.array([[0.5, 9.0]])), "Query → value: most in layer 0 (Q/K, head 0.1)"),
    Case("null", uses(np.zeros((2, 4))), "no layer's scores surely stand out", "most"),
    # Beyond 1.96 standard errors, as one of eight is by chance in a third of cases.
    Case("boundary", uses(np.array([[2.1, 0, 0, 0], [0, 0, 0, 0]])), "surely stand out", "most"),
    Case("planted", edited((0.1, 1)), "surely leaves less than the placebo in layer 0, 0.10 of"),
    Case("null", edited((0.97, 1)), "n no layer does blocking", "surely leaves less"),
    Case("boundary", edited((0.8, 1)), "n no layer does blocking", "surely leaves less"),
    # Layer 1 has the least, and an interval that reaches the placebo's.
    Case("boundary", edited((0.6, 0.5), half=(0.1, 0.5)), "in layer 0, 0.60", "in layer 1, 0.5"),
    Case(
        "planted", selection(estimate(0.9)), "AUROC of its bias is 0.900 [0.800, 1.000]", "no bet"
    ),
    Case("null", selection(estimate(0.5)), "[0.400, 0.600], no better than chance"),
    Case("boundary", selection(NO_ROWS), "0.500 [one row: no interval]"),
    Case("planted", kept(0.2, 0.8), "keeps between 20.0 % (key at 0–7) and 80.0 % (key at 8–15)"),
    Case("null", kept(1.0, 1.0), "keeps 100.0 % of the keys everywhere", "between"),
    Case("boundary", kept(math.nan, 0.5), "keeps 50.0 % of the keys everywhere", "between"),
    Case("boundary", kept(0.50001, 0.5), "keeps 50.0 % of the keys everywhere", "between"),
    Case(
        "planted", effect(estimate(0.4, 0.0), 0.001), "without the masks of layer 0: they do harm"
    ),
    Case("null", effect(estimate(0.0, 0.0), 0.5), "by +0.0 points [-10.0, +10.0]", "they do harm"),
    Case("boundary", effect(NO_ROWS, 1.0), "[one row: no interval]", "they do harm"),
    Case("planted", moved(0.3, 0.1), "The mask of layer 0 moves furthest, by 0.3"),
    Case("null", moved(0.0, 0.0), "The masks are dead", "furthest"),
    Case("boundary", moved(0.0, 0.1), "No mask is elsewhere at the last step", "furthest"),
    Case("planted", trajectory(0.2, 0.9), "range from 0.2 (band 1) to 0.9 (band 2)"),
    Case("null", trajectory(1, 1), "No value ever changes.", "most"),
    Case("boundary", trajectory(0.4, 0.4), "bands of positions are all 0.4.", "(band"),
    Case("planted", biases(0.1), "acts most strongly in layer 0"),
    Case("null", biases(0.5, gradient=0.0), "The mask of layer 0 is dead", "strongly"),
    # A window still masks where all biases are equal.
    Case("boundary", biases(1.0), "cancels in the softmax: no bias acts yet", "no mask"),
]
__all__ = ["CASES", "Case", "edited", "uses"]

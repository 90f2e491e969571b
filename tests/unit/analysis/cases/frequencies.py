"""What rotary frequencies add to scores, planted by hand."""

import math
from dataclasses import replace

import numpy as np

from analysis.frequencies import BandAblation, BandAblations
from analysis.frequencies.lags import FrequenciesByLag, LagCurves, ScoresByLag, find_peak
from analysis.frequencies.spectra import (
    Energies,
    FrequencySpectrum,
    FrequencyUse,
    FrequencyUses,
)
from tests.unit.analysis.case import Case

WAVES = np.array([6.0, 60.0])


def spectra(*long: float, uniform: float = 0.5) -> Energies:
    """Return a layer for each share of energy on long wavelengths."""
    even = np.full((1, 2), 0.5)
    layers = (
        FrequencySpectrum(
            i, "Q/K", WAVES, even, np.full(1, 2 + 0 * share), np.array([share]), uniform
        )
        for i, share in enumerate(long)
    )
    return Energies(tuple(layers), 16)


def uses(*advantages: list[float], error: float = 1.0, long: float = 0.0) -> FrequencyUses:
    """Return one kind of edge in layers of some heads, by advantage of each head."""
    found = []
    for layer, by_head in enumerate(advantages):
        ours = np.array(by_head)
        best, zero = int(np.abs(ours).argmax()), np.zeros(len(ours))
        ends = ours[best] - 1.96 * error, ours[best] + 1.96 * error
        by_pair, share = np.stack([ours, zero], 1), np.full(len(ours), long)
        place = layer, "Q/K", "query → value", WAVES
        found.append(FrequencyUse(*place, ours, best, ends, ours, by_pair, share, 0.5))
    return FrequencyUses(tuple(found), 16)


def against(low: float, high: float) -> FrequencyUses:
    """Return a use by negative scores, −9, with this interval."""
    [use] = uses([0.5, -9.0]).layers
    return FrequencyUses((replace(use, interval=(low, high)),), 16)


def curve(*rise: float, sides: str = "Q/K", pairs: int = 400, half: float = 1.0) -> LagCurves:
    """Return a layer of one head by how far its score stands out at each lag."""
    score, one = np.array(rise)[:, None], np.ones(1)
    lags, head = np.arange(1, len(rise) + 1), np.zeros(1, int)
    decay, by_pair = half ** lags[:, None].astype(float), np.stack([0 * score, score], 2)
    place = 0, sides, head, lags, np.full(len(rise), pairs)
    edges = {"query → value": 2 * score, "value → key": 0 * score}
    return LagCurves(*place, score, decay, score * decay, 0 * one, one, edges, WAVES, by_pair)


def scores(*layers: LagCurves) -> ScoresByLag:
    return ScoresByLag(layers)


def parts(*layers: LagCurves) -> FrequenciesByLag:
    peaks = tuple(peak for layer in layers if (peak := find_peak(layer)) is not None)
    return FrequenciesByLag(layers, peaks)


def bands(*changes: float, accuracy: float = 0.9) -> BandAblations:
    found = (
        BandAblation(0, "Q/K", name, (6.0, 9.0), x, (x - 0.05, x + 0.05), np.full(19, -0.1))
        for name, x in zip(("fast", "middle", "slow"), changes, strict=False)
    )
    ends = accuracy - 0.05, accuracy + 0.05
    return BandAblations(tuple(found), accuracy, ends, 0.06)


PEAK, FLAT, DEEP = (0.1, 2.0, 0.1), (0.1, 0.2, 0.1), (0.1, -2.0, 0.1)
CASES = [
    Case("planted", spectra(0.9, 0.5), "longer than the row: 1 of 2; to wavelengths within it: 0"),
    Case("planted", spectra(0.2), "longer than the row: 0 of 1; to wavelengths within it: 1"),
    Case("null", spectra(0.5, 0.5), "longer than the row: 0 of 2; to wavelengths within it: 0"),
    Case("null", spectra(math.nan), "layer 0 (Q/K) – 50.0 % – of 2"),
    Case("boundary", spectra(0.6), "longer than the row: 0 of 1; to wavelengths within it: 0"),
    Case("boundary", spectra(0.0, uniform=0.0), "longer than the row: 0 of 1;", "within it: 1"),
    Case("planted", uses([0.5, 9.0]), "random edges: query → value in layer 0 (Q/K, head 0.1)."),
    Case("null", uses([0.0] * 4, [0.0] * 4), "those of random edges: none.", "query"),
    # Beyond 1.96 standard errors, as one of eight is by chance in a third of cases.
    Case("boundary", uses([2.1, 0, 0, 0], [0.0] * 4), "those of random edges: none.", "query"),
    Case("boundary", uses([9.0], long=-0.3), "+9.00 -30.0 % 50.0 %"),
    Case("boundary", against(-10, -8), "random edges: query → value in layer 0 (Q/K, head 0.1)."),
    Case("boundary", against(-10, 1), "random edges: none."),
    Case("planted", scores(curve(*PEAK), curve(*FLAT)), "mean score prefers a lag: 1 of 2;"),
    Case(
        "planted",
        scores(curve(*DEEP, sides="C/B", half=0.5)),
        "prefers a lag: 1 of 1; lags at which decay has halved a layer's scores: 1.",
    ),
    Case(
        "null",
        scores(curve(*FLAT)),
        "a lag: 0 of 1; lags at which decay has halved a layer's scores: none.",
    ),
    Case("boundary", scores(curve(*DEEP)), "mean score prefers a lag: 0 of 1;"),
    Case("boundary", scores(curve(*PEAK, pairs=9)), "No lag has the 100 pairs", "layers"),
    Case("planted", parts(curve(*PEAK)), "layer 0 (Q/K) 2 +2.0 1 of 2 60"),
    Case("null", parts(curve(*FLAT)), "a lag: 0 of 1; fewest frequencies that add half of the"),
    Case("boundary", parts(curve(*DEEP, sides="C/B")), "layer 0 (C/B) 2 -2.0 1 of 2 60"),
    Case("boundary", parts(curve(*PEAK, pairs=9)), "No lag has the 100 pairs of", "of 1"),
    Case("planted", bands(-0.5), "all random thirds: 0 · Q/K fast (-50.0 points) (1 of 1;"),
    Case("planted", bands(-0.5), "0 · Q/K fast -50.0 -55.0 to -45.0 -10.0 to -10.0"),
    Case(
        "null", bands(-0.05, 0.0, 0.0), "all random thirds: none (0 of 3; by chance one or", "fast"
    ),
    Case("boundary", bands(-0.1), "(0 of 1; by chance one or more in up to 5 % of models)"),
    Case("boundary", bands(-0.5, accuracy=0.1), "not shown to be above chance", "fast"),
]

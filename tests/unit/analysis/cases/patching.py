"""Sweeps of patches and effects of edges: planted by hand."""

import numpy as np

from analysis.patching import EdgeEffects, PatchSweep
from tests.unit.analysis.case import Case


def edges(*effects: float, method: str = "measured edge by edge") -> EdgeEffects:
    names = tuple(f"L0H{i}" for i in range(len(effects)))
    return EdgeEffects(names, ("logits",), np.array(effects)[:, None], 1.0, 0.0, method)


def sweep(*metric: float, clean: float = 1.0) -> PatchSweep:
    labels = tuple(map(str, range(len(metric))))
    return PatchSweep("z", "head", np.zeros(1, int), np.array([metric]), clean, 0.0, labels)


CASES = [
    Case("planted", edges(0.1, -0.8), "L0H1 → logits changes the metric most: by -0.8"),
    Case("planted", edges(0.1, 0.8, method="estimated from gradients"), "edges, estimated from"),
    Case("null", edges(0, 0), "No edge of 2, measured edge by edge, changes", "most"),
    Case("boundary", edges(0.5, -0.5), "L0H1 logits -0.5"),
    Case("planted", sweep(0.1, 0.9), "head 0.1 restores most: 0.90 of the difference"),
    Case("null", sweep(0.0, -0.2), "No patch restores a hundredth", "most"),
    Case("null", sweep(0.0, 0.0, clean=0.0), "No patch restores a hundredth", "most"),
    Case("boundary", sweep(0.0099), "No patch restores a hundredth", "most"),
    Case("boundary", sweep(0.01), "head 0.0 restores most: 0.01 of the difference"),
]

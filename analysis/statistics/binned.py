"""Accuracy by bins of a whole number, and which bins stand out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from jaxtyping import Bool, Float, Int

from analysis.statistics.intervals import bound_share
from analysis.words import count_interval_decimals, percent
from lab.intervals import Z95


@dataclass(frozen=True)
class Bins:
    """Accuracy by bins of a whole number.

    Attributes:
        first: smallest number of each bin.
        last: its largest, included.
        accuracy: share of right answers in [0, 1].
        interval: 95 %, low and high (`bound_share`).
        count: answers in the bin, ≥ 1.
    """

    first: Int[np.ndarray, " n"]
    last: Int[np.ndarray, " n"]
    accuracy: Float[np.ndarray, " n"]
    interval: Float[np.ndarray, "n 2"]
    count: Int[np.ndarray, " n"]


def bin_accuracy(
    number: Int[np.ndarray, " q"],
    edges: Int[np.ndarray, " edges"],
    right: Bool[np.ndarray, " q"],
    rows: Int[np.ndarray, " q"],
    rng: np.random.Generator,
) -> Bins:
    """Compute accuracy by bins edges[i] ≤ number < edges[i + 1]; empty bins are left out."""
    places = np.digitize(number, edges) - 1
    found = np.unique(places)
    inside = [places == place for place in found]
    return Bins(
        first=edges[found],
        last=np.minimum(edges[found + 1] - 1, number.max()),
        accuracy=np.array([right[i].mean() for i in inside]),
        interval=np.array([bound_share(right[i], rows[i], rng) for i in inside]),
        count=np.array([i.sum() for i in inside]),
    )


def describe_contrast(found: Bins, one: str, many: str) -> str:
    """Say where accuracy is best and worst, or that no bin stands out.

    Args:
        found: the bins.
        one: name of a bin of one number, such as "distance".
        many: its plural, for bins of several numbers.
    """
    names = [
        f"{many if found.last[i] > found.first[i] else one} {format_span(found, i)}"
        for i in range(len(found.first))
    ]
    return describe_extremes(found, names) or f"no {one} stands out"


def describe_extremes(found: Bins, names: Sequence[str]) -> str:
    """Say where accuracy is best and worst; an empty text if chance could explain the contrast.

    The best and the worst were chosen among all pairs of bins, so the difference must exceed its
    interval at 5 % divided by the number of pairs (Bonferroni's bound).
    """
    best, worst = int(found.accuracy.argmax()), int(found.accuracy.argmin())
    pairs = math.comb(len(found.accuracy), 2)
    if best == worst or not pairs:
        return ""
    widening = NormalDist().inv_cdf(1 - 0.025 / pairs) / Z95
    below = found.accuracy[best] - found.interval[best, 0]
    above = found.interval[worst, 1] - found.accuracy[worst]
    if not found.accuracy[best] - found.accuracy[worst] > widening * math.hypot(below, above):
        return ""
    most, least = float(found.accuracy[best]), float(found.accuracy[worst])
    decimals = count_interval_decimals(least, most)
    ends = [
        f"{percent(share, decimals)} at {names[i]}" for share, i in ((most, best), (least, worst))
    ]
    return f"{ends[0]} against {ends[1]}"


def format_span(found: Bins, i: int) -> str:
    """Format the numbers of a bin: "3" or "4–7"."""
    first, last = found.first[i], found.last[i]
    return f"{first}" if first == last else f"{first}–{last}"

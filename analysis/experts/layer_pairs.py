"""How often the experts of a layer are chosen by the same token, next to shuffled choices."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from analysis.experts.pairs import (
    EDGES,
    ExpertPairs,
    PairedChoices,
    count_pairs,
    find_coalition,
    shuffle_choices,
)
from analysis.words import percent

PAIRS = 2**20
"""Maximum number of co-occurrences that are counted, all layers together."""
SHUFFLES = 19
"""Shuffles of all layers; a claim that beats the best of them is then wrong 1 time in 20."""
TOP = 4
"""Pairs that are named."""
OFTEN = 5
"""Minimum number of tokens that choose a pair that is named."""


@dataclass(frozen=True)
class TopPair:
    """Two experts that are often chosen by the same token, as (row, column) each.

    Attributes:
        first: an expert's place on the grid.
        second: the other's.
        both: tokens that choose both.
        expected: how many would if the two were independent.
        pmi: log(both/expected), nats.
    """

    first: tuple[int, int]
    second: tuple[int, int]
    both: int
    expected: float
    pmi: float


@dataclass(frozen=True)
class LayerPairs:
    """The pairs of experts that a layer's tokens choose together.

    Attributes:
        layer: index of the block.
        tokens: a random sample on which pairs are counted.
        distinct: how many different pairs occur.
        possible: how many pairs the chosen experts could form.
        mean_pmi: over co-occurrences, nats; NaN without pairs. Independent choices are near
            log(1 − 1/s), not 0, since the s choices of a token compete.
        initial: the same before training; None if unknown.
        null: the same for each shuffle of the choices among token ids.
        aligned: share of co-occurrences with the row key or the column key in common.
        aligned_null: its mean over shuffles.
        coalition: experts of the largest set that is bound together (`find_coalition`).
        top: the pairs that exceed independence most, by both · pmi.
        heights: share of co-occurrences in each bin of PMI (`EDGES`).
        null_heights: their means over shuffles.
    """

    layer: int
    tokens: int
    distinct: int
    possible: int
    mean_pmi: float
    initial: float | None
    null: Float[np.ndarray, " shuffles"]
    aligned: float
    aligned_null: float
    coalition: Int[np.ndarray, " members"]
    top: tuple[TopPair, ...]
    heights: Float[np.ndarray, " bins"]
    null_heights: Float[np.ndarray, " bins"]

    @property
    def excess(self) -> float:
        """How far the mean PMI is above that of the shuffles, nats."""
        return self.mean_pmi - float(self.null.mean())

    def describe(self) -> str:
        """Name the strongest pairs and what they have in common."""
        says = (
            f"Layer {self.layer}, {self.tokens:,} tokens: {self.distinct:,} of {self.possible:,} "
            f"possible pairs occur; {percent(self.aligned)} of co-occurrences have a key in common "
            f"(shuffled: {percent(self.aligned_null)})"
        )
        if self.top:
            pairs = ", ".join(
                f"{pair.first} and {pair.second} {pair.both:,} times, {pair.expected:,.0f} expected"
                for pair in self.top[:2]
            )
            says += f"; furthest beyond independence, as (row, column): {pairs}"
        if len(self.coalition):
            says += (
                "; the largest set that is mostly chosen together has "
                f"{len(self.coalition)} experts"
            )
        return f"{says}."


def measure_pairs(
    found: PairedChoices,
    rng: np.random.Generator,
    budget: int = PAIRS,
    initial: PairedChoices | None = None,
) -> LayerPairs:
    """Measure which experts of a layer are chosen by the same token.

    Args:
        found: the layer's choices.
        rng: draws the tokens that are counted, and shuffles.
        budget: about how many co-occurrences to count.
        initial: the layer's choices before training, if known.
    """
    columns = found.shape[1]
    most = budget // max(1, math.comb(found.experts.shape[1], 2))
    chosen = found.sample(most, rng)
    pairs, size = count_pairs(chosen.experts), len(chosen.experts)
    before = None if initial is None else count_pairs(initial.sample(size, rng).experts).mean_pmi
    null, aligned, heights = np.zeros(SHUFFLES), 0.0, np.zeros(len(EDGES) - 1)
    for i in range(SHUFFLES):
        chance = count_pairs(shuffle_choices(chosen, rng))
        null[i] = chance.mean_pmi
        aligned += chance.compute_aligned_share(columns) / SHUFFLES
        heights += chance.bin_pmi() / SHUFFLES
    return LayerPairs(
        layer=found.layer,
        tokens=size,
        distinct=len(pairs.both),
        possible=math.comb(len(np.unique(chosen.experts)), 2),
        mean_pmi=pairs.mean_pmi,
        initial=before,
        null=null,
        aligned=pairs.compute_aligned_share(columns),
        aligned_null=aligned,
        coalition=find_coalition(pairs),
        top=_find_top(pairs, columns),
        heights=pairs.bin_pmi(),
        null_heights=heights,
    )


def _find_top(pairs: ExpertPairs, columns: int) -> tuple[TopPair, ...]:
    often = np.flatnonzero(pairs.both >= OFTEN)
    excess = (pairs.both * pairs.pmi)[often]
    best = often[np.argsort(-excess, kind="stable")[:TOP]]
    expected, pmi = pairs.expected[best], pairs.pmi[best]
    return tuple(
        TopPair(
            first=_locate(int(pairs.first[i]), columns),
            second=_locate(int(pairs.second[i]), columns),
            both=int(pairs.both[i]),
            expected=float(expected[n]),
            pmi=float(pmi[n]),
        )
        for n, i in enumerate(best)
        if pmi[n] > 0
    )


def _locate(expert: int, columns: int) -> tuple[int, int]:
    return expert // columns, expert % columns

"""Which experts the same token chooses: every pair, counted, against independence.

Pairs are counted as they occur: a table of experts by experts would not fit a million of them.

    n tokens    s choices a token makes, all retrieval heads together    p pairs that occur
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from analysis.base import NotApplicableError
from analysis.experts.choices import chosen_experts
from lab.layers.retrieval import RetrievedExperts
from lab.models import LanguageModel
from tasks.base import Batch

BOUND = 0.5
"""Overlap from which two experts count as bound together."""
EDGES = np.linspace(-4, 10, 141)
"""Of the bins of PMI, nats."""


@dataclass(frozen=True)
class Choices:
    """What the tokens of a batch chose in a layer with product keys.

    Attributes:
        layer: index of the block.
        kind: the layer's class.
        shape: row keys and column keys; expert = row · columns + column.
        zero_keys: whether all keys are zero, so that all scores tie.
        experts: of each token, those of all retrieval heads side by side.
        ids: of the tokens, each one's input.
    """

    layer: int
    kind: str
    shape: tuple[int, int]
    zero_keys: bool
    experts: Int[np.ndarray, "n s"]
    ids: Int[np.ndarray, " n"]

    def sample(self, most: int, rng: np.random.Generator) -> "Choices":
        """Return the choices of at most so many tokens, at least one, drawn without replacement."""
        most = max(1, most)
        if len(self.experts) <= most:
            return self
        fig = rng.choice(len(self.experts), most, replace=False)
        return replace(self, experts=self.experts[fig], ids=self.ids[fig])


def choices(model: LanguageModel, batch: Batch) -> list[Choices]:
    """Return what every layer with product-key experts chooses on a batch, by layer.

    Raises:
        NotApplicableError: for a model without such a layer.
    """
    found, ids = [], batch.inputs.flatten().cpu().numpy()
    for chosen in chosen_experts(model, batch):
        module = model.blocks[chosen.layer].mlp
        if isinstance(module, RetrievedExperts):
            rows, columns = module.shape
            keys = (module.row_keys, module.column_keys)
            tied = not any(bool(key.any()) for key in keys)
            experts = chosen.indices.reshape(len(chosen.indices), -1)
            found.append(Choices(chosen.layer, chosen.kind, (rows, columns), tied, experts, ids))
    if not found:
        raise NotApplicableError("no block retrieves experts by product keys")
    return found


@dataclass(frozen=True)
class Pairs:
    """The pairs of different experts that at least one token chose together.

    Attributes:
        first: the lower expert of each pair.
        second: the higher one.
        both: tokens that chose both, ≥ 1.
        alone: tokens that chose each of the two.
        tokens: how many there were.
    """

    first: Int[np.ndarray, " p"]
    second: Int[np.ndarray, " p"]
    both: Int[np.ndarray, " p"]
    alone: Int[np.ndarray, "p 2"]
    tokens: int

    @property
    def expected(self) -> Float[np.ndarray, " p"]:
        """How many tokens would choose both if the two were independent: n_e n_f / n."""
        return self.alone.prod(1, dtype=np.float64) / self.tokens

    @property
    def pmi(self) -> Float[np.ndarray, " p"]:
        """Pointwise mutual information log(n_ef n / n_e n_f), nats: 0 for independent experts."""
        return np.log(self.both / self.expected)

    @property
    def overlap(self) -> Float[np.ndarray, " p"]:
        """Jaccard index: tokens that chose both, of those that chose either, in (0, 1]."""
        return self.both / (self.alone.sum(1) - self.both)

    @property
    def mean_pmi(self) -> float:
        """The mean over co-occurrences, so that rare pairs weigh little; NaN without any."""
        return float(np.average(self.pmi, weights=self.both)) if len(self.both) else math.nan

    def aligned(self, columns: int) -> float:
        """Return the share of co-occurrences with a row key or a column key in common."""
        (row, column), (other_row, other_column) = (
            np.divmod(expert, columns) for expert in (self.first, self.second)
        )
        same = (row == other_row) | (column == other_column)
        return float(self.both[same].sum() / max(1, self.both.sum()))

    def heights(self) -> Float[np.ndarray, " bins"]:
        """Return the share of co-occurrences in each bin of PMI, `EDGES`; none is left out."""
        inside = np.clip(self.pmi, EDGES[0], np.nextafter(EDGES[-1], 0))
        return np.histogram(inside, EDGES, weights=self.both)[0] / max(1, self.both.sum())


def count_pairs(chosen: Int[np.ndarray, "n s"]) -> Pairs:
    """Count all pairs of different experts that a token chose; chosen twice counts once."""
    experts = np.sort(chosen, axis=1)
    fresh = np.ones(experts.shape, dtype=bool)
    fresh[:, 1:] = experts[:, 1:] != experts[:, :-1]
    names, alone = np.unique(experts[fresh], return_counts=True)
    # Places among the experts that occur keep the keys of pairs far from overflow.
    place = np.searchsorted(names, experts)
    i, j = np.triu_indices(experts.shape[1], 1)
    keys = (place[:, i] * len(names) + place[:, j])[fresh[:, i] & fresh[:, j]]
    if len(names) ** 2 <= len(keys):
        # A table of all pairs is no larger than the keys, and counted sooner than they are sorted.
        table = np.bincount(keys)
        pairs = np.flatnonzero(table)
        both = table[pairs]
    else:
        pairs, both = np.unique(keys, return_counts=True)
    first, second = np.divmod(pairs, len(names))
    return Pairs(
        first=names[first],
        second=names[second],
        both=both,
        alone=np.stack([alone[first], alone[second]], axis=1),
        tokens=len(chosen),
    )


def exchanged(ids: Int[np.ndarray, " n"], rng: np.random.Generator) -> Int[np.ndarray, " n"]:
    """Return for each token another to take its place: the ids change places, whole.

    All tokens of an id get tokens of one other id, drawn with replacement. Tokens of one id choose
    much alike, so that n shuffled tokens would pass for n independent ones.
    """
    known, kind, size = np.unique(ids, return_inverse=True, return_counts=True)
    order = np.argsort(kind, kind="stable")
    new = rng.permutation(len(known))[kind]
    return order[(np.cumsum(size) - size)[new] + rng.integers(size[new])]


def shuffled(found: Choices, rng: np.random.Generator) -> Int[np.ndarray, "n s"]:
    """Return the choices with each of the s given by another token id, each by itself.

    Experts keep about the loads they have; together with whom they are chosen is left to chance.
    """
    slots = [slot[exchanged(found.ids, rng)] for slot in found.experts.T]
    return np.stack(slots, axis=1)


def coalition(pairs: Pairs) -> Int[np.ndarray, " members"]:
    """Return the largest set of experts that overlaps of at least one half hold together.

    Members are joined by chains of such pairs, ascending; empty where no pair overlaps so much.
    """
    edges = pairs.overlap >= BOUND
    ends = np.stack([pairs.first[edges], pairs.second[edges]])
    members, places = np.unique(ends, return_inverse=True)
    if not len(members):
        return members
    a, b = places.reshape(2, -1)
    label = np.arange(len(members))
    while True:
        lower = label.copy()
        np.minimum.at(lower, a, label[b])
        np.minimum.at(lower, b, label[a])
        if (lower == label).all():
            return members[label == np.bincount(label).argmax()]
        label = lower

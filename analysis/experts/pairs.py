"""Pairs of experts that the same token chooses, compared with independent choices.

Only pairs that occur are stored: a table of all pairs of a million experts would not fit.

    n tokens    s choices a token makes, all retrieval heads together    p pairs that occur
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from analysis.base import NotApplicableError
from analysis.experts.choices import record_choices
from lab.layers.retrieval import RetrievedExperts
from lab.models import LanguageModel
from tasks.base import Batch

BOUND = 0.5
"""Overlap from which on two experts count as bound together."""
EDGES = np.linspace(-4, 10, 141)
"""Edges of the bins of PMI, nats."""


@dataclass(frozen=True)
class PairedChoices:
    """What the tokens of a batch choose in a layer with product keys, to be paired.

    Attributes:
        layer: index of the block.
        kind: the layer's class.
        shape: row keys and column keys; expert = row · columns + column.
        zero_keys: whether all keys are zero, so that all scores tie.
        experts: of each token, those of all retrieval heads side by side.
        ids: input token ids.
    """

    layer: int
    kind: str
    shape: tuple[int, int]
    zero_keys: bool
    experts: Int[np.ndarray, "n s"]
    ids: Int[np.ndarray, " n"]

    def sample(self, most: int, rng: np.random.Generator) -> "PairedChoices":
        """Draw the choices of at most `most` tokens, but of one at least, without replacement."""
        most = max(1, most)
        if len(self.experts) <= most:
            return self
        kept = rng.choice(len(self.experts), most, replace=False)
        return replace(self, experts=self.experts[kept], ids=self.ids[kept])


def collect_choices(model: LanguageModel, batch: Batch) -> list[PairedChoices]:
    """Collect what a batch chooses in each layer with product-key experts.

    Raises:
        NotApplicableError: for a model without such a layer.
    """
    found, ids = [], batch.inputs.flatten().cpu().numpy()
    for chosen in record_choices(model, batch):
        module = model.blocks[chosen.layer].mlp
        if isinstance(module, RetrievedExperts):
            rows, columns = module.shape
            keys = (module.row_keys, module.column_keys)
            tied = not any(bool(key.any()) for key in keys)
            experts = chosen.indices.reshape(len(chosen.indices), -1)
            found.append(
                PairedChoices(chosen.layer, chosen.kind, (rows, columns), tied, experts, ids)
            )
    if not found:
        raise NotApplicableError("no block retrieves experts by product keys")
    return found


@dataclass(frozen=True)
class ExpertPairs:
    """The pairs of different experts that at least one token chooses together.

    Attributes:
        first: the lower expert of each pair.
        second: the higher one.
        both: tokens that choose both, ≥ 1.
        alone: tokens that choose each of the two.
        tokens: how many there are.
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
        """Jaccard index: share of the tokens with either expert that choose both, in (0, 1]."""
        return self.both / (self.alone.sum(1) - self.both)

    @property
    def mean_pmi(self) -> float:
        """The mean over co-occurrences, so that rare pairs weigh little; NaN without pairs."""
        return float(np.average(self.pmi, weights=self.both)) if len(self.both) else math.nan

    def compute_aligned_share(self, columns: int) -> float:
        """Return the share of co-occurrences with a row key or a column key in common."""
        (row, column), (other_row, other_column) = (
            np.divmod(expert, columns) for expert in (self.first, self.second)
        )
        same = (row == other_row) | (column == other_column)
        return float(self.both[same].sum() / max(1, self.both.sum()))

    def bin_pmi(self) -> Float[np.ndarray, " bins"]:
        """Return the share of co-occurrences in each bin of PMI; the outer bins take the rest."""
        inside = np.clip(self.pmi, EDGES[0], np.nextafter(EDGES[-1], 0))
        return np.histogram(inside, EDGES, weights=self.both)[0] / max(1, self.both.sum())


def count_pairs(chosen: Int[np.ndarray, "n s"]) -> ExpertPairs:
    """Count the tokens that choose each pair of different experts."""
    experts = np.sort(chosen, axis=1)
    fresh = np.ones(experts.shape, dtype=bool)
    fresh[:, 1:] = experts[:, 1:] != experts[:, :-1]
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
    return ExpertPairs(
        first=names[first],
        second=names[second],
        both=both,
        alone=np.stack([alone[first], alone[second]], axis=1),
        tokens=len(chosen),
    )


def exchange_ids(ids: Int[np.ndarray, " n"], rng: np.random.Generator) -> Int[np.ndarray, " n"]:
    """Return for each token the index of a token to replace it: token ids are permuted as a whole.

    All tokens of an id get tokens of one other id, drawn with replacement. Tokens of one id choose
    much alike; if tokens were shuffled singly, they would look like independent ones.
    """
    known, kind, size = np.unique(ids, return_inverse=True, return_counts=True)
    order = np.argsort(kind, kind="stable")
    new = rng.permutation(len(known))[kind]
    return order[(np.cumsum(size) - size)[new] + rng.integers(size[new])]


def shuffle_choices(found: PairedChoices, rng: np.random.Generator) -> Int[np.ndarray, "n s"]:
    """Take each of the s choices of a token from another token id, independently.

    Experts keep about the same loads; which ones are chosen together is left to chance.
    """
    slots = [slot[exchange_ids(found.ids, rng)] for slot in found.experts.T]
    return np.stack(slots, axis=1)


def find_coalition(pairs: ExpertPairs) -> Int[np.ndarray, " members"]:
    """Find the largest set of experts connected by pairs whose overlap is at least one half.

    Returns:
        its members, ascending; empty where no pair overlaps so much.
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

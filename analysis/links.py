"""Positions of a row that belong together, and how far after a value each layer finds it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.base import Subject
from analysis.mixing import BlockMixer, collect_mixers, get_reach
from lab.intervals import bootstrap
from lab.layers.mixer import MatrixMixer
from tasks.base import MAX_ROWS, Batch, count_rows

PAIR_LINKS = ("query_pos", "key_pos", "value_pos")
"""The links of a task that stores pairs of keys and values."""
SHOWS = 0.25
"""How far from a uniform row's mass to all of it a head must be to show that it looks there."""
OFFSET_TOKENS, OFFSET_ROWS = 16_384, 32
"""Maximum number of tokens and rows on which offsets are chosen and confirmed."""


@dataclass(frozen=True)
class Offsets:
    """How many positions after a value a layer finds it: a convolution may move it there.

    Attributes:
        read: by layer, how far after a value its queries look, where that is not 0.
        written: by layer, how far after a value it gathers the key for a later layer that reads
            there, where that is not 0.
    """

    read: dict[int, int] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)

    @property
    def gathered(self) -> int:
        """How far after a value a layer gathers its key for a later one."""
        return next(iter(self.written.values()), 0)

    def get(self, layer: int) -> tuple[int, int]:
        """Return how far after a value a layer reads it, and how far it gathers its key."""
        return self.read.get(layer, 0), self.written.get(layer, 0)


IN_PLACE = Offsets()
"""Every layer finds a value at its own position."""


@dataclass(frozen=True)
class AnswerLinks:
    """Positions of one row that belong together; no keys and values if the task stores no pairs.

    A query finds a value `read` positions after it, and its key is gathered `written` after it.
    """

    queries: Int[np.ndarray, " q"]
    keys: Int[np.ndarray, " pairs"]
    values: Int[np.ndarray, " pairs"]
    read: int = 0
    written: int = 0

    @property
    def expected(self) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
        """Rows and columns of the matrix where queries meet their values."""
        queries = self.queries[: len(self.values)]
        kept = self.values + self.read <= queries
        return queries[kept], self.values[kept] + self.read


def find_links(batch: Batch, row: int = 0) -> AnswerLinks:
    """Return which positions of a row of a batch belong together, without padding."""
    if not has_pairs(batch):
        scored = batch.scored[row].nonzero()[:, 0].cpu().numpy()
        return AnswerLinks(scored, scored[:0], scored[:0])
    query, key, value = (link[0].cpu().numpy() for link in find_pairs(batch[row : row + 1]))
    real = query >= 0
    return AnswerLinks(query[real], key[real], value[real])


def has_pairs(batch: Batch) -> bool:
    """Whether the task's links name where a query's key and value were stored, as tokens."""
    return set(PAIR_LINKS) <= batch.links.keys() and not batch.inputs.is_floating_point()


def find_pairs(
    batch: Batch,
) -> tuple[Int[Tensor, "b pairs"], Int[Tensor, "b pairs"], Int[Tensor, "b pairs"]]:
    """Return the positions of queries, their keys and their values: the pairs first, then −1.

    Where one of the three is missing, as for the first token of a copied string, there is no pair.
    """
    links = torch.stack([batch.links[name] for name in PAIR_LINKS])
    whole = (links >= 0).all(0)
    order = (~whole).long().argsort(dim=1, stable=True)
    query, key, value = links.masked_fill(~whole, -1).gather(2, order.expand_as(links))
    return query, key, value


def find_offsets(subject: Subject) -> Offsets:
    """Return how far after a value each layer of a subject reads it; it is found once."""
    if "offsets" not in subject.known:
        subject.known["offsets"] = _find_offsets(subject)
    return subject.known["offsets"]


@torch.no_grad()
def _find_offsets(subject: Subject) -> Offsets:
    """Find how far after a value each layer reads it, on the last rows of the task's test split.

    Offsets up to a convolution's width are tried. The one with the most mass is chosen on half of
    the rows. It counts if, on the other half, its mass is surely more than at offset 0 and more
    than a placebo's: the best of as many offsets out of the convolution's reach, chosen likewise.
    """
    reach = {
        i: get_reach(b.mixer)
        for i, b in enumerate(subject.model.list_blocks())
        if b.mixer is not None
    }
    if subject.task.vectors or all(width == 1 for width in reach.values()):
        return IN_PLACE  # of vectors, none is the copy of another
    seq_len = subject.batch.inputs.shape[1]
    size = count_rows(OFFSET_TOKENS, seq_len, fewest=8, most=OFFSET_ROWS)
    device = subject.batch.inputs.device
    batch = subject.task.batch(
        split="test", start=MAX_ROWS - size, size=size, seed=subject.seed, device=device
    )
    links = {row: _find_reads(batch, row) for row in range(size)}
    links = {row: of for row, of in links.items() if len(of.values)}
    rng, found = np.random.default_rng(subject.seed), Offsets()
    mixers = [m for m in collect_mixers(subject.model, batch) if isinstance(m.module, MatrixMixer)]

    def find(mixer: BlockMixer, tried: Sequence[int], away: int, *, writes: bool) -> int:
        at = np.array([*tried, *(offset + away for offset in tried)])
        shares = []
        for row, of in links.items():
            places = of.values[:, None] + at
            ends = (places, of.keys[:, None]) if writes else (of.queries[:, None], places)
            targets, sources = np.broadcast_arrays(*ends)
            # A position's share of itself tells nothing.
            found = mixer.measure_shares(row, targets.copy(), sources.copy()) * (sources < targets)
            shares.append(found.mean(1).T)
        return tried[_choose(shares, rng)]

    for mixer in mixers:
        width = reach[mixer.layer]
        if width > 1 and (offset := find(mixer, range(width), width, writes=False)):
            found.read[mixer.layer] = offset
    for mixer in mixers:
        later = next((layer for layer in sorted(found.read) if layer > mixer.layer), None)
        if later is not None:
            tried = 0, found.read[later]
            if offset := find(mixer, tried, reach[later], writes=True):
                found.written[mixer.layer] = offset
    return found


def _find_reads(batch: Batch, row: int) -> AnswerLinks:
    """Return a row's links; in a task without pairs a token asks what followed its last copy."""
    if has_pairs(batch):
        return find_links(batch, row)
    tokens = batch.inputs[row].cpu().numpy()
    same = np.tril(tokens[:, None] == tokens, -1)
    queries = same.any(1).nonzero()[0]
    keys = len(tokens) - 1 - same[queries, ::-1].argmax(1)
    return AnswerLinks(queries, keys, keys + 1)


def _choose(by_row: list[Float[np.ndarray, "o h"]], rng: np.random.Generator) -> int:
    """Return which of the first half of offsets surely has most mass, or 0, the first.

    The second half of the offsets is the placebo's.
    """
    if len(by_row) < 4:
        return 0
    chosen, judged = np.array(by_row[::2]), np.array(by_row[1::2])
    half = len(by_row[0]) // 2

    def judge_best(of: slice) -> tuple[int, Float[np.ndarray, " b"]]:
        mean = chosen[:, of].mean(0)
        offset, head = np.unravel_index(int(mean.argmax()), mean.shape)
        return int(offset), judged[:, of][:, offset, head]

    offset, shares = judge_best(slice(0, half))
    rivals = [judge_best(of)[1] for of in (slice(0, 1), slice(half, None))]
    sure = all(bootstrap(shares - rival, rng)[0] > 0 for rival in rivals)
    return offset if sure else 0

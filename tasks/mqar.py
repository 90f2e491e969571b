"""Multi-query associative recall: key–value pairs, then each key once; what was its value?"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar, Literal, get_args

from tasks import counter
from tasks.base import IGNORE, Batch, Links, Predictor, Preset, Task
from tasks.bounds import MAX_VOCAB_SIZE, check_choice, option
from tasks.lazy import Tensor, torch
from tasks.shortcuts import copy_latest_match, find_followers, look_at, pick_stored_value

KEY, VALUE, QUERY, FILLER = range(4)
Fillers = Literal["any", "fresh", "zero"]
MAX_SEQ_LEN = 2**17
"""Shorter than in other tasks: `counter.Race` draws from at most 2¹⁶ slots, of two tokens each."""


@dataclass(frozen=True, kw_only=True)
class MQAR(Task):
    """Recall the values of K keys, each asked for once.

    A row is k₁ v₁ k₂ v₂ … k_K v_K, then (T − 2K)/2 slots of two tokens. The query for a key is
    at the even position of its slot; all other positions of the slots are fillers. Keys are
    distinct, uniform in 1 … V/2 − 1; values distinct, uniform in V/2 … V − 1. Key 1 draws its slot
    first, then key 2, …, without replacement, slot s = 1, 2, … with probability ∝ s^(power − 1).
    In the split "probe" all slots are equally likely, so that distance does not depend on store
    order.

    With T = 8, two pairs and V = 10, row 0 of seed 0 is

    >>> batch = MQAR(seq_len=8, n_pairs=2, vocab_size=10).batch(size=1)
    >>> batch.inputs.tolist()
    [[4, 7, 1, 6, 1, 4, 4, 8]]
    >>> batch.targets.tolist()
    [[-100, -100, -100, -100, 6, -100, 7, -100]]

    The pairs are 4 → 7 and 1 → 6; the slots are 1 4, with a filler that is a decoy, and 4 8.

    Scored: the K queries. Chance: 2/V, a guess among the V/2 values.

    Fillers: "any" is uniform over the whole vocabulary, so that a filler may repeat a key or
    value of the row (a decoy); "fresh" is uniform over the V − 2K tokens that are neither;
    "zero" is token 0.

    Links, int64 [b q] in store order: query_pos, key_pos, value_pos, store_slot, query_slot (both
    from 0), distance (query_pos − value_pos) and decoy (1 where a filler before the query equals
    its key, else 0).

    Raises:
        ValueError: for an option out of bounds.

    Source: Arora et al. 2024 (Zoology), `multiquery_ar` with `random_non_queries=True`; hard with
    K = T/4 in Wonderful Matrices, tab:multi_query_associative_recall:data.

    Departs: a row depends on its number alone, not on a global generator.
    """

    name: ClassVar[str] = "mqar"
    role_names: ClassVar[tuple[str, ...]] = ("key", "value", "query", "filler")
    splits: ClassVar[tuple[str, ...]] = ("train", "test", "probe", "validation")
    separates: ClassVar[str] = "capacity: attention's cache against an SSD state"
    presets: ClassVar[dict[str, Preset]] = {
        "small": Preset({"seq_len": 64, "vocab_size": 256}, "LOG.md, small presets", seconds=30),
        "published": Preset(
            {"seq_len": 2048, "vocab_size": 8192},
            "Wonderful Matrices, tab:multi_query_associative_recall:data, its longest",
        ),
    }

    seq_len: int = option(256, "tokens per row; even")
    n_pairs: int | None = option(None, "key–value pairs per row", "T/4")
    vocab_size: int = option(8192, "size of the vocabulary; the upper half is for values")
    power: float = option(0.01, "a query gets slot s with probability ∝ s^(power − 1)")
    fillers: Fillers = option("any", "any token, fresh (never a key or value of the row), or zero")

    def validate(self) -> None:
        """Validate the options."""
        if self.seq_len < 4:
            raise ValueError(f"seq_len={self.seq_len}: too short, must be ≥ 4 (a pair and a slot)")
        if self.seq_len > MAX_SEQ_LEN:
            raise ValueError(f"seq_len={self.seq_len}: too long, must be ≤ {MAX_SEQ_LEN}")
        if self.seq_len % 2:
            raise ValueError(f"seq_len={self.seq_len}: must be even, because a slot is two tokens")
        if not self.seq_len < self.vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(
                f"vocab_size={self.vocab_size}: must be > seq_len={self.seq_len} "
                f"and ≤ {MAX_VOCAB_SIZE}"
            )
        if self.vocab_size % 2:
            raise ValueError(f"vocab_size={self.vocab_size}: must be even, half are values")
        if not 1 <= self.pair_count <= self.seq_len // 4:
            raise ValueError(
                f"n_pairs={self.n_pairs}: must be in 1 … {self.seq_len // 4} (seq_len / 4); "
                f"a longer seq_len allows more"
            )
        if not 0 < self.power < float("inf"):
            raise ValueError(f"power={self.power}: must be > 0 and finite")
        check_choice("fillers", self.fillers, get_args(Fillers))

    def resize(self, seq_len: int) -> Task:
        """Return the task in rows of another length, with T/4 pairs if it now has that many."""
        if self.n_pairs == self.seq_len // 4:
            return self.replace(n_pairs=None).resize(seq_len)
        return super().resize(seq_len)

    @property
    def pair_count(self) -> int:
        """The number of pairs K of a row."""
        return self.seq_len // 4 if self.n_pairs is None else self.n_pairs

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b]) on the device of `numbers`.

        Tokens are images of points under a permutation that keeps 0 and parity: pair
        i = 1 … K has its key at point 2i and its value at 2i + 1, token 0 is point 0. So the
        point of a filler alone determines whether it is fresh, and which key it is a decoy of.
        """
        n_pairs = self.pair_count
        t, context, half = self.seq_len, 2 * n_pairs, self.vocab_size // 2
        n_slots, n_fillers = (t - context) // 2, t - 3 * n_pairs
        n_rounds, device = counter.count_rounds(half), numbers.device
        word = self.draw_words(split, numbers, seed, n_rounds + n_fillers)
        mixing, word = word[:, :n_rounds], word[:, n_rounds:]

        race = _make_slot_race(n_slots, 1.0 if split == "probe" else self.power, device)
        slot = race.order(word[:, :n_slots])
        position = (2 * slot).add_(context)
        query_pos, spare_pos = position[:, :n_pairs], position[:, n_pairs:]

        point = self._draw_filler_points(n_pairs, word)
        points = torch.empty(len(numbers), context + n_fillers, dtype=torch.int32, device=device)
        points[:, :context] = torch.arange(2, context + 2, device=device)
        points[:, context:] = point
        image = counter.permute(mixing, points, half, lanes=2, keep_zero=True)
        token = (image & 1).mul_(half).add_(image.bitwise_right_shift_(1))
        filler = token[:, context:]

        inputs = torch.empty(len(numbers), t, dtype=torch.int64, device=device)
        inputs[:, :context] = token[:, :context]
        inputs[:, context + 1 :: 2] = filler[:, :n_slots]
        inputs.scatter_(1, query_pos, token[:, :context:2].long())
        targets = torch.full_like(inputs, IGNORE).scatter_(1, query_pos, inputs[:, 1:context:2])
        roles = _list_roles(t, n_pairs, device).clone()
        if n_slots > n_pairs:
            inputs.scatter_(1, spare_pos, filler[:, n_slots:].long())
            roles = roles.repeat(len(numbers), 1).scatter_(1, query_pos, QUERY)
        else:  # every slot holds a query: all rows have the same roles, and share their memory
            roles = roles.expand(len(numbers), -1)

        links = partial(self._make_links, slot[:, :n_pairs], point, spare_pos)
        return Batch(inputs, targets, roles, Links(links))

    def _make_links(self, slot: Tensor, point: Tensor, spare_pos: Tensor) -> dict[str, Tensor]:
        """Make the links from the queries' slots [b q] and the fillers' points [b f]."""
        n_pairs, t = slot.shape[1], self.seq_len
        store = torch.arange(n_pairs, device=slot.device).expand_as(slot)
        query_pos, context = 2 * (slot + n_pairs), 2 * n_pairs
        filler_pos = torch.arange(context + 1, t, 2, device=slot.device).expand(len(slot), -1)
        filler_pos = torch.cat((filler_pos, spare_pos), 1)
        return {
            "query_pos": query_pos,
            "key_pos": 2 * store,
            "value_pos": 2 * store + 1,
            "store_slot": store,
            "query_slot": slot,
            "distance": query_pos - (2 * store + 1),
            "decoy": (_find_first(point, filler_pos, context + 2, t) < query_pos).long(),
        }

    def _draw_filler_points(self, n_pairs: int, word: Tensor) -> Tensor:
        """Draw the points [b f] whose images are the fillers."""
        if self.fillers == "zero":
            return torch.zeros_like(word)
        if self.fillers == "any":
            return counter.draw_below(word, self.vocab_size)
        fresh = counter.draw_below(word, self.vocab_size - 2 * n_pairs)
        return fresh + 2 * n_pairs * (fresh > 1)  # points 2 … 2K + 1 are the pairs

    def oracle(self, batch: Batch) -> Tensor:
        """Return the value of the key at each even position (-100 where there is no key).

        The first occurrence of a key of the row is in its pair, so what follows it there is
        its value, whatever K. Where slots are empty (K < T/4) a filler at an even position may
        equal a key; nothing in the row distinguishes it from the query, so the oracle answers
        there, too. At every scored position the answer is the target.
        """
        answers = find_followers(batch.inputs, latest=False)
        token = batch.inputs
        even = torch.arange(token.shape[1], device=token.device) % 2 == 0
        return answers.where(even & (token > 0) & (token < self.vocab_size // 2), IGNORE)

    @property
    def chance(self) -> float:
        """The accuracy of a guess among the V/2 values."""
        return 2 / self.vocab_size

    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that look right without recalling by key.

        "context value" is a random stored value, "last value" the last one stored: 1/K.
        "position only" answers with stored value i in slot i: about 2/K, as early keys draw
        early slots. "most recent match" copies what last followed the token: right unless a decoy
        follows the pair. A bigram table over rows is at chance, as pairs are drawn anew; within a
        row it is the most recent match. A uniform guess is `chance`.
        """
        n_pairs = self.pair_count
        return {
            "context value": pick_stored_value(n_pairs, 2),
            "last value": look_at(2 * n_pairs - 1),
            "position only": self._copy_by_slot,
            "most recent match": copy_latest_match,
        }

    def _copy_by_slot(self, batch: Batch) -> Tensor:
        position = torch.arange(batch.inputs.shape[1], device=batch.inputs.device)
        slot = position // 2 - self.pair_count
        return batch.inputs[:, 2 * (slot % self.pair_count) + 1]


@lru_cache(maxsize=64)
def _list_roles(seq_len: int, n_pairs: int, device: "torch.device") -> Tensor:
    """Return the roles [t] that all rows have: queries only where every slot holds one."""
    roles = torch.full((seq_len,), FILLER, device=device)
    roles[: 2 * n_pairs : 2], roles[1 : 2 * n_pairs : 2] = KEY, VALUE
    if seq_len == 4 * n_pairs:
        roles[2 * n_pairs :: 2] = QUERY
    return roles


@lru_cache(maxsize=64)
def _make_slot_race(n_slots: int, power: float, device: "torch.device") -> counter.Race:
    slots = torch.arange(1, n_slots + 1, dtype=torch.float64)
    return counter.Race.from_log_weights((power - 1) * slots.log2(), device)


def _find_first(point: Tensor, position: Tensor, end: int, none: int) -> Tensor:
    """Find the first position [b q] of each even point 2, 4, … < end, `none` where it is absent."""
    first = point.new_full((len(point), end + 1), none)
    first.scatter_reduce_(1, point.clamp(max=end), position, "amin")
    return first[:, 2:end:2]

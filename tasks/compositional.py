"""Compositional recall: a value is stored under two keys; neither alone determines it."""

from dataclasses import dataclass
from math import isqrt
from typing import Any, ClassVar

from tasks import counter
from tasks.base import IGNORE, Batch, Links, Predictor, Preset, Task
from tasks.bounds import MAX_SEQ_LEN, MAX_VOCAB_SIZE, check_range, option
from tasks.lazy import Tensor, torch
from tasks.shortcuts import look_at, look_back, pick_stored_value

FIRST, SECOND, VALUE, QUERY, FILLER = range(5)


@dataclass(frozen=True, kw_only=True)
class Compositional(Task):
    """Recall the value of a pair of keys, from a full grid of √K × √K pairs.

    A row is K triples, first key, second key, value, in random order; then a slot for each of the K
    pairs, once, in random order: first key, second key, filler; then fillers to the end. So each of
    √K first keys occurs with each of √K second keys. First keys are distinct, uniform in 1 … V/4 −
    1; second keys in V/4 … V/2 − 1; values in V/2 … V − 1 (quarter and half rounded down); fillers
    are token 0.

    With a grid of 2 × 2 and V = 16, row 0 of seed 0 is

    >>> task = Compositional(seq_len=24, n_pairs=4, vocab_size=16)
    >>> batch = task.batch(size=1)
    >>> batch.inputs[:, :12].tolist()
    [[2, 7, 11, 1, 7, 10, 1, 4, 15, 2, 4, 8]]
    >>> batch.inputs[:, 12:].tolist()
    [[2, 4, 0, 2, 7, 0, 1, 4, 0, 1, 7, 0]]
    >>> batch.targets[:, 12:].tolist()
    [[-100, 8, -100, -100, 11, -100, -100, 15, -100, -100, 10, -100]]

    Key 2 alone has the values 11 and 8, key 4 alone 15 and 8; 2 with 4 has 8.

    Scored: the second key of each slot. Chance: 2/V, a guess among the V/2 values.

    Links, int64 [b q] in the order of the queries: query_pos, key_pos (the stored second key),
    first_key_pos, value_pos, distance (query_pos − value_pos).

    Raises:
        ValueError: for an option out of bounds.

    Source: Zhan et al. 2025 (Overcoming Long-Context Limitations of State-Space Models via
    Context-Dependent Sparse Attention), joint recall: the value of a key in a given context.

    Departs: their table is written context by context; here the triples are shuffled, so that a
    context is named by a token each time, not by the position of the pair.
    """

    name: ClassVar[str] = "compositional"
    role_names: ClassVar[tuple[str, ...]] = ("first key", "second key", "value", "query", "filler")
    separates: ClassVar[str] = "binding, inner functions"
    grows: ClassVar[tuple[str, ...]] = ("seq_len", "n_pairs")
    presets: ClassVar[dict[str, Preset]] = {
        "small": Preset(
            {"seq_len": 24, "n_pairs": 4, "vocab_size": 32},
            "LOG.md, small presets",
            seconds=44,
        ),
        "published": Preset(
            {"seq_len": 512, "n_pairs": 64},
            "no shuffled grid is published; 8 × 8, for joint recall (Zhan et al. 2025)",
        ),
    }

    seq_len: int = option(256, "tokens per row")
    n_pairs: int = option(36, "pairs of keys per row; a square")
    vocab_size: int = option(
        8192, "size of the vocabulary, shared 1:1:2 by first keys, second keys and values"
    )

    def validate(self) -> None:
        """Validate the options."""
        check_range("seq_len", self.seq_len, 24, MAX_SEQ_LEN, "a grid of 2 × 2, stored and asked")
        check_range("n_pairs", self.n_pairs, 4, self.seq_len // 6, "seq_len / 6")
        if self.side**2 != self.n_pairs:
            raise ValueError(
                f"n_pairs={self.n_pairs}: must be a square, "
                f"{self.side**2} and {(self.side + 1) ** 2} are near"
            )
        least = max(2 * self.n_pairs, 4 * self.side + 4)
        check_range("vocab_size", self.vocab_size, least, MAX_VOCAB_SIZE, "half of them values")

    def _scale(self, name: str, value: Any, seq_len: int) -> Any:
        """Return the value of an option at another row length; n_pairs stays a square."""
        scaled = super()._scale(name, value, seq_len)
        return isqrt(scaled) ** 2 if name == "n_pairs" else scaled

    @property
    def side(self) -> int:
        """The number of first keys, and of second keys, of a row."""
        return isqrt(self.n_pairs)

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b]) on the device of `numbers`."""
        n_pairs, side, v = self.n_pairs, self.side, self.vocab_size
        quarter, half, device = v // 4, v // 2, numbers.device
        pools = (quarter - 1, half - quarter, v - half)
        sizes = [*map(counter.count_rounds, pools), n_pairs, n_pairs]
        word = self.draw_words(split, numbers, seed, sum(sizes)).split(sizes, 1)
        first = 1 + counter.draw_distinct(word[0], side, pools[0])
        second = quarter + counter.draw_distinct(word[1], side, pools[1])
        values = half + counter.draw_distinct(word[2], n_pairs, pools[2])
        # Pair p is first key p // side with second key p % side.
        stored, asked = counter.draw_order(word[3]), counter.draw_order(word[4])

        context, end = 3 * n_pairs, 6 * n_pairs
        inputs = torch.zeros(len(numbers), self.seq_len, dtype=torch.int64, device=device)
        inputs[:, :context:3] = first.gather(1, stored // side)
        inputs[:, 1:context:3] = second.gather(1, stored % side)
        inputs[:, 2:context:3] = values
        inputs[:, context:end:3] = first.gather(1, asked // side)
        inputs[:, context + 1 : end : 3] = second.gather(1, asked % side)
        place = stored.argsort(1).gather(1, asked)
        targets = torch.full_like(inputs, IGNORE)
        targets[:, context + 1 : end : 3] = values.gather(1, place)
        roles = torch.full((self.seq_len,), FILLER, device=device)
        roles[:end:3], roles[1:context:3], roles[2:context:3] = FIRST, SECOND, VALUE
        roles[context + 1 : end : 3] = QUERY

        def links() -> dict[str, Tensor]:
            query = torch.arange(context + 1, end, 3, device=device).repeat(len(numbers), 1)
            return {
                "query_pos": query,
                "key_pos": 3 * place + 1,
                "first_key_pos": 3 * place,
                "value_pos": 3 * place + 2,
                "distance": query - 3 * place - 2,
            }

        return Batch(inputs, targets, roles.expand(len(numbers), -1), Links(links))

    def oracle(self, batch: Batch) -> Tensor:
        """Return the value stored under the two keys of each slot."""
        answers = torch.full_like(batch.inputs, IGNORE)
        context = 3 * self.n_pairs
        for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
            stored = {(row[p], row[p + 1]): row[p + 2] for p in range(0, context, 3)}
            for p in range(context, 2 * context, 3):
                answer[p + 1] = stored[row[p], row[p + 1]]
        return answers

    @property
    def chance(self) -> float:
        """The accuracy of a guess among the values."""
        return 1 / (self.vocab_size - self.vocab_size // 2)

    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that look right without binding the two keys.

        "second key" and "first key" answer with the latest value stored with that key: 1/√K, as
        one pair of each key's √K is right. "both keys agree" answers with that value where it is
        the same for both keys, which is then the pair's, else with the first stored with the first
        key: .833 of a grid of 2 × 2, .257 of 6 × 6. "context value" is a stored value at random,
        "last value" the last stored, "position only" the i-th stored in slot i: 1/K. Copying
        what followed the most recent match gives "second key", or a filler where the key was asked
        with another; a bigram table is at chance, as tokens are drawn anew.
        """
        return {
            "second key": lambda batch: self._find_latest(batch, 1),
            "first key": lambda batch: self._find_latest(batch, 0),
            "both keys agree": self._answer_if_both_agree,
            "context value": pick_stored_value(self.n_pairs, 3),
            "last value": look_at(3 * self.n_pairs - 1),
            "position only": look_back(3 * self.n_pairs - 1),
        }

    def _find_latest(self, batch: Batch, which: int) -> Tensor:
        """Return the latest value stored with the first (0) or second (1) key of each slot."""
        answers = torch.full_like(batch.inputs, IGNORE)
        context = 3 * self.n_pairs
        for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
            latest = dict(zip(row[which:context:3], row[2:context:3], strict=True))
            for p in range(context, 2 * context, 3):
                answer[p + 1] = latest[row[p + which]]
        return answers

    def _answer_if_both_agree(self, batch: Batch) -> Tensor:
        """Return the keys' common latest value, else the first value stored with the first key."""
        answers = torch.full_like(batch.inputs, IGNORE)
        context = 3 * self.n_pairs
        for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
            latest: dict[int, int] = {}
            earliest: dict[int, int] = {}
            for p in range(0, context, 3):
                latest[row[p]] = latest[row[p + 1]] = row[p + 2]
                earliest.setdefault(row[p], row[p + 2])
            for p in range(context, 2 * context, 3):
                value = latest[row[p]]
                agree = value == latest[row[p + 1]]
                answer[p + 1] = value if agree else earliest[row[p]]
        return answers

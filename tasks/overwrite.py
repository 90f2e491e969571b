"""Overwriting: every key is written several times; what was its latest value?"""

from dataclasses import dataclass
from typing import ClassVar

from tasks import counter
from tasks.base import IGNORE, Batch, Links, Predictor, Preset, Task
from tasks.bounds import MAX_SEQ_LEN, MAX_VOCAB_SIZE, check_range, option
from tasks.lazy import Tensor, torch
from tasks.shortcuts import draw_numbers, find_followers, look_at, look_back, pick_stored_value

KEY, VALUE, QUERY, FILLER = range(4)


@dataclass(frozen=True, kw_only=True)
class Overwrite(Task):
    """Recall the latest value of K keys, each written 1 + R times.

    A row is W = K(1 + R) writes, key then value, in random order, then a slot a key, key then
    filler, and fillers to the end. With `spacing`, keys come in groups of that size (the last may
    be smaller): each group is written in 1 + R rounds, every round in a new random order, before
    the next group, so that a key is written again 1 to 2·spacing − 1 writes later.
    Each key is asked once, in random order. Keys are distinct, uniform in 1 … V/2 − 1; values
    distinct, uniform in V/2 … V − 1 (V/2 rounded down); fillers are token 0.

    With spacing = K the latest values are the last K written: their position tells them from stale
    ones, and a static mask is enough. Random order needs something that decays.

    With two keys, each rewritten once, and V = 12, row 0 of seed 0 is

    >>> task = Overwrite(seq_len=12, n_pairs=2, rewrites=1, vocab_size=12)
    >>> batch = task.batch(size=1)
    >>> batch.inputs.tolist()
    [[3, 7, 5, 9, 3, 6, 5, 10, 5, 0, 3, 0]]
    >>> batch.targets.tolist()
    [[-100, -100, -100, -100, -100, -100, -100, -100, 10, -100, 6, -100]]

    The writes are 3 → 7, 5 → 9, then 3 → 6, 5 → 10, which are the ones asked for.

    Scored: the K queries. Chance: 2/V, a guess among the V/2 values.

    Links, int64 [b q] in the order of the queries: query_pos, key_pos and value_pos (of the latest
    write), first_value_pos (of the first), distance (query_pos − value_pos).

    Raises:
        ValueError: for an option out of bounds.

    Source: Arora et al. 2024 (Zoology), `multiquery_ar`, for the row; Wang and Sun 2025 (Unable to
    Forget) for rewrites, which language models recall worse the more there are.

    Departs: unlike in the latter, keys and values are single tokens, and all keys are asked.
    """

    name: ClassVar[str] = "overwrite"
    role_names: ClassVar[tuple[str, ...]] = ("key", "value", "query", "filler")
    separates: ClassVar[str] = "decay and dt against a static mask"
    grows: ClassVar[tuple[str, ...]] = ("seq_len", "n_pairs")
    presets: ClassVar[dict[str, Preset]] = {
        "small": Preset(
            {"seq_len": 64, "n_pairs": 4, "vocab_size": 64},
            "LOG.md, small presets",
            seconds=54,
        ),
        "published": Preset(
            {"seq_len": 1024, "n_pairs": 46},
            "Wang and Sun 2025 (Unable to Forget): 46 keys, each updated 3 times and more",
        ),
    }
    evaluations: ClassVar[dict[str, tuple[int, ...]]] = {
        "rewrites": (0, 1, 3, 5),
        "spacing": (1, 2, 4),
    }

    seq_len: int = option(256, "tokens per row")
    n_pairs: int = option(16, "keys per row")
    rewrites: int = option(3, "how many times each key is written again")
    spacing: int | None = option(
        None,
        "keys that are written in turn before the next group",
        "none: all writes in random order",
    )
    vocab_size: int = option(8192, "size of the vocabulary; the upper half is for values")

    def validate(self) -> None:
        """Validate the options."""
        check_range("seq_len", self.seq_len, 4, MAX_SEQ_LEN)
        check_range("rewrites", self.rewrites, 0, self.seq_len // 2 - 2, "seq_len / 2 − 2")
        most = self.seq_len // (2 * self.rewrites + 4)
        check_range("n_pairs", self.n_pairs, 1, most, "seq_len / (2·rewrites + 4)")
        if self.spacing is not None:
            check_range("spacing", self.spacing, 1, self.n_pairs, "n_pairs")
        least = 2 * max(self.n_pairs + 1, self.n_writes)
        check_range(
            "vocab_size", self.vocab_size, least, MAX_VOCAB_SIZE, "as many values as writes"
        )

    @property
    def n_writes(self) -> int:
        """The number of writes W of a row."""
        return self.n_pairs * (1 + self.rewrites)

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b]) on the device of `numbers`."""
        n_pairs, n_writes, half = self.n_pairs, self.n_writes, self.vocab_size // 2
        n_values, device = self.vocab_size - half, numbers.device
        sizes = [counter.count_rounds(half - 1), counter.count_rounds(n_values), n_writes, n_pairs]
        word = self.draw_words(split, numbers, seed, sum(sizes)).split(sizes, 1)
        keys = 1 + counter.draw_distinct(word[0], n_pairs, half - 1)
        values = half + counter.draw_distinct(word[1], n_writes, n_values)
        write = self._order_writes(word[2])
        asked = counter.draw_order(word[3])

        context, end = 2 * n_writes, 2 * (n_writes + n_pairs)
        inputs = torch.zeros(len(numbers), self.seq_len, dtype=torch.int64, device=device)
        inputs[:, :context:2] = keys.gather(1, write % n_pairs)
        inputs[:, 1:context:2] = values
        inputs[:, context:end:2] = keys.gather(1, asked)
        place = write.argsort(1).unflatten(1, (-1, n_pairs))
        first, latest = (side(1).gather(1, asked) for side in (place.amin, place.amax))
        targets = torch.full_like(inputs, IGNORE)
        targets[:, context:end:2] = values.gather(1, latest)
        roles = torch.full((self.seq_len,), FILLER, device=device)
        roles[:context:2], roles[1:context:2], roles[context:end:2] = KEY, VALUE, QUERY

        def links() -> dict[str, Tensor]:
            query = torch.arange(context, end, 2, device=device).repeat(len(numbers), 1)
            return {
                "query_pos": query,
                "key_pos": 2 * latest,
                "value_pos": 2 * latest + 1,
                "first_value_pos": 2 * first + 1,
                "distance": query - 2 * latest - 1,
            }

        return Batch(inputs, targets, roles.expand(len(numbers), -1), Links(links))

    def _order_writes(self, word: Tensor) -> Tensor:
        """Return the order of the writes [b w]; write w belongs to key w mod K."""
        if self.spacing is None:
            return counter.draw_order(word)
        write = torch.arange(self.n_writes, device=word.device)
        turn, group = write // self.n_pairs, write % self.n_pairs // self.spacing
        return counter.draw_order((group * (1 + self.rewrites) + turn << 32) | (word & 0xFFFFFFFF))

    def oracle(self, batch: Batch) -> Tensor:
        """Return the latest value written under the key of each slot."""
        answers = torch.full_like(batch.inputs, IGNORE)
        context = 2 * self.n_writes
        for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
            stored = dict(zip(row[:context:2], row[1:context:2], strict=True))
            for position in range(context, context + 2 * self.n_pairs, 2):
                answer[position] = stored[row[position]]
        return answers

    @property
    def chance(self) -> float:
        """The accuracy of a guess among the values."""
        return 1 / (self.vocab_size - self.vocab_size // 2)

    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that look right without telling the latest value from stale ones.

        "first written" is the key's first value: 0, or 1 without rewrites. "written value" is one
        of the key's values at random: 1/(1 + R). "context value" is a stored value at random: 1/W;
        "last value" the last stored: 1/K. "position only" answers with the value that the i-th of
        the last K writes stored in slot i: 1/K with spacing = K, less otherwise. Copying what
        followed the most recent match solves the task, as fillers are not keys; a bigram table is
        at chance, as tokens are drawn anew.
        """
        return {
            "first written": lambda batch: find_followers(batch.inputs, latest=False),
            "written value": self._pick_written_value,
            "context value": pick_stored_value(self.n_writes, 2),
            "last value": look_at(2 * self.n_writes - 1),
            "position only": look_back(2 * self.n_pairs - 1),
        }

    def _pick_written_value(self, batch: Batch) -> Tensor:
        n_writes = self.n_writes
        keys, values = batch.inputs[:, : 2 * n_writes : 2], batch.inputs[:, 1 : 2 * n_writes : 2]
        # After a stable sort the writes of a key are adjacent, from its first to its latest.
        keys, order = keys.sort(dim=1, stable=True)
        pick = draw_numbers("written value", batch.inputs, 1 + self.rewrites)
        place = torch.searchsorted(keys, batch.inputs.contiguous()) + pick
        return values.gather(1, order.gather(1, place.clamp(max=n_writes - 1)))

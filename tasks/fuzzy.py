"""Fuzzy recall: keys and values are motifs of one or more tokens, and motifs share tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tasks import counter
from tasks.base import IGNORE, Batch, Links, Predictor, Preset, Task
from tasks.bounds import MAX_SEQ_LEN, MAX_VOCAB_SIZE, check_range, option
from tasks.lazy import Tensor, torch
from tasks.shortcuts import (
    copy_first_match,
    copy_latest_match,
    copy_two_token_match,
    predict_by_position,
)

KEY, VALUE, QUERY, ANSWER, FILLER = range(5)
MAX_MOTIFS = 2**30
"""Motifs of one length that `counter.permute` can number."""


@dataclass(frozen=True, kw_only=True)
class Fuzzy(Task):
    """Recall values of several tokens by keys of several tokens.

    A row is K pairs, key motif then value motif; then all of them again in a random order; then
    fillers, token 0. A key has 1 … `max_key_len` tokens, each length equally likely, each token
    uniform in 1 … V/2 − 1 (V/2 rounded down); no two keys of a row are the same string, but they
    may share tokens, and one may end with another. A value has 1 … `max_value_len` tokens in V/2 …
    V − 1, and may be the value of several keys. The motifs are not marked: a key ends where a value
    begins.

    With two pairs and V = 8, row 0 of seed 0 is

    >>> task = Fuzzy(seq_len=20, n_pairs=2, max_value_len=2, vocab_size=8)
    >>> batch = task.batch(size=1)
    >>> batch.inputs.tolist()
    [[1, 1, 3, 4, 6, 1, 2, 1, 4, 1, 1, 3, 4, 6, 1, 2, 1, 4, 0, 0]]
    >>> batch.targets[:, 9:].tolist()
    [[-100, -100, 4, 6, -100, -100, -100, 4, -100, -100, -100]]

    The pairs are 1 1 3 → 4 6 and 1 2 1 → 4. What follows token 1 depends on the tokens before it.

    Scored: in the second half the last token of each key, whose answer is the value's first token,
    and each token of the value but its last, whose answer is the next. Chance: 2/V, a guess among
    the V/2 tokens of values.

    Links, int64 [b q], scored positions from left to right, −1 from their end: query_pos, key_pos
    (the stored token that the one at query_pos repeats), value_pos (the one after, the answer),
    motif (which pair, 0 … K − 1), distance (query_pos − value_pos).

    Raises:
        ValueError: for an option out of bounds.

    Source: Poli et al. 2024 (Mechanistic Design and Scaling of Hybrid Architectures), fuzzy
    in-context recall; its configuration in the mad-lab repository: V = 16, T = 128, motifs of up
    to 3 tokens.

    Departs: every pair occurs twice, where theirs are drawn until the row is full; tokens of a
    motif may repeat; pairs are drawn anew each row.
    """

    name: ClassVar[str] = "fuzzy"
    role_names: ClassVar[tuple[str, ...]] = ("key", "value", "query", "answer", "filler")
    separates: ClassVar[str] = "short convolution against attention"
    grows: ClassVar[tuple[str, ...]] = ("seq_len", "n_pairs")
    presets: ClassVar[dict[str, Preset]] = {
        "small": Preset(
            {"seq_len": 64, "n_pairs": 5, "vocab_size": 16},
            "LOG.md, small presets",
            seconds=75,
        ),
        "published": Preset(
            {"seq_len": 128, "n_pairs": 7, "vocab_size": 16},
            "Poli et al. 2024, mad-lab's configs/tasks/fuzzy-in-context-recall.yml; as many pairs "
            "as it has key tokens",
        ),
    }

    seq_len: int = option(256, "tokens per row")
    n_pairs: int = option(16, "key and value motifs per row")
    max_key_len: int = option(3, "length of the longest key")
    max_value_len: int = option(3, "length of the longest value")
    vocab_size: int = option(64, "size of the vocabulary; the upper half is for values")

    def validate(self) -> None:
        """Validate the options."""
        check_range("seq_len", self.seq_len, 4, MAX_SEQ_LEN, "a pair, twice")
        check_range("vocab_size", self.vocab_size, 6, MAX_VOCAB_SIZE, "two tokens for keys")
        half, fits = self.seq_len // 2, 1
        while fits < half - 1 and self.n_key_tokens ** (fits + 1) <= MAX_MOTIFS:
            fits += 1
        why = f"seq_len / 2 − 1; (vocab_size / 2 − 1)^max_key_len ≤ {MAX_MOTIFS}"
        check_range("max_key_len", self.max_key_len, 1, fits, why)
        most = half - self.max_key_len
        check_range("max_value_len", self.max_value_len, 1, most, "seq_len / 2 − max_key_len")
        most = min(half // (self.max_key_len + self.max_value_len), self.n_key_tokens)
        why = "seq_len / (2·max_key_len + 2·max_value_len); vocab_size / 2 − 1"
        check_range("n_pairs", self.n_pairs, 1, most, why)

    @property
    def n_key_tokens(self) -> int:
        """The number of different tokens in keys."""
        return self.vocab_size // 2 - 1

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b]) on the device of `numbers`.

        A pair is first written as max_key_len + max_value_len tokens; those past the end of its key
        or value get the position after the row's last, which is cut off.
        """
        n_pairs, t, split_at = self.n_pairs, self.seq_len, self.max_key_len
        lengths = range(1, self.max_key_len + 1)
        mixing = [counter.count_rounds(self.n_key_tokens**length) for length in lengths]
        sizes = [*mixing, n_pairs, n_pairs, n_pairs * self.max_value_len, n_pairs]
        word = self.draw_words(split, numbers, seed, sum(sizes)).split(sizes, 1)
        key_len = 1 + counter.draw_below(word[-4], self.max_key_len)
        value_len = 1 + counter.draw_below(word[-3], self.max_value_len)
        keys = self._draw_keys(word[: len(mixing)], key_len)
        half = self.vocab_size // 2
        values = half + counter.draw_below(word[-2], self.vocab_size - half)
        values = values.view(-1, n_pairs, self.max_value_len)
        asked = counter.draw_order(word[-1])

        once = torch.arange(n_pairs, device=numbers.device).expand_as(asked)
        motif = torch.cat([once, asked], 1)
        position = self._place(key_len.gather(1, motif), value_len.gather(1, motif))
        token = _gather_pairs(torch.cat([keys, values], 2), motif)
        # In the second half, the position before each token of a value is asked for that token.
        value_pos, answer = position[:, n_pairs:, split_at:], token[:, n_pairs:, split_at:]
        query_pos = torch.where(value_pos < t, value_pos - 1, t)

        inputs = torch.zeros(len(numbers), t + 1, dtype=torch.int64, device=numbers.device)
        targets, roles = torch.full_like(inputs, IGNORE), torch.full_like(inputs, FILLER)
        inputs.scatter_(1, position.flatten(1), token.flatten(1))
        targets.scatter_(1, query_pos.flatten(1), answer.flatten(1))
        role = torch.full_like(position, KEY)
        role[:, :n_pairs, split_at:] = VALUE
        role[:, n_pairs:, :split_at], role[:, n_pairs:, split_at:] = QUERY, ANSWER
        roles.scatter_(1, position.flatten(1), role.flatten(1))

        def links() -> dict[str, Tensor]:
            stored = _gather_pairs(position[:, :n_pairs, split_at:], asked)
            every = {
                "query_pos": query_pos,
                "key_pos": stored - 1,
                "value_pos": stored,
                "motif": asked[:, :, None].expand_as(stored),
                "distance": query_pos - stored,
            }
            unscored = (query_pos == t).flatten(1)
            order = unscored.long().argsort(dim=1, stable=True)
            return {
                name: link.flatten(1).masked_fill(unscored, -1).gather(1, order)
                for name, link in every.items()
            }

        return Batch(inputs[:, :t], targets[:, :t], roles[:, :t], Links(links))

    def _draw_keys(self, words: Sequence[Tensor], length: Tensor) -> Tensor:
        """Draw keys [b k l] of these lengths; those of one length have different numbers."""
        base, number = self.n_key_tokens, torch.zeros_like(length)
        for n_tokens, word in enumerate(words, 1):
            drawn = counter.draw_distinct(word, self.n_pairs, base**n_tokens)
            number = torch.where(length == n_tokens, drawn, number)
        place = [base**power for power in range(self.max_key_len)]
        return 1 + number[:, :, None] // torch.tensor(place, device=length.device) % base

    def _place(self, key_len: Tensor, value_len: Tensor) -> Tensor:
        """Return the positions [b k l] of motifs laid end to end; seq_len past the end of one."""
        length = key_len + value_len
        start = (length.cumsum(1) - length)[:, :, None]
        key = torch.arange(self.max_key_len, device=length.device)
        value = torch.arange(self.max_value_len, device=length.device)
        key_len, value_len = key_len[:, :, None], value_len[:, :, None]
        return torch.cat(
            [
                torch.where(key < key_len, start + key, self.seq_len),
                torch.where(value < value_len, start + key_len + value, self.seq_len),
            ],
            2,
        )

    def oracle(self, batch: Batch) -> Tensor:
        """Return the next token of the value that the same key had before."""
        answers = torch.full_like(batch.inputs, IGNORE)
        for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
            stored: dict[tuple[int, ...], list[int]] = {}
            key: tuple[int, ...] = ()
            value: list[int] = []
            for position, token in enumerate(row):
                if token == 0:
                    break
                if token < self.vocab_size // 2:
                    if value:
                        stored.setdefault(key, value)
                        key, value = (), []
                    key += (token,)
                else:
                    value.append(token)
                known = stored.get(key, [])
                if len(value) < len(known):
                    answer[position] = known[len(value)]
        return answers

    @property
    def chance(self) -> float:
        """The accuracy of a guess among the tokens of values."""
        return 1 / (self.vocab_size - self.vocab_size // 2)

    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that look right without matching whole keys.

        "most recent match" copies what last followed the last token alone: about 1/2 at the
        defaults, more where tokens seldom recur. "first match" copies what followed it first: .65.
        "two tokens" matches the last two, or one where they are new: .946, and .93 at "small". A
        third token adds little, and brings both to .950: nearly all of the rest are keys of one
        token, which occurred in another key before. "last value" is the latest token of a value so
        far, "position only" what is most often right there: near chance. A bigram table is at
        chance, as motifs are drawn anew.
        """
        return {
            "most recent match": copy_latest_match,
            "first match": copy_first_match,
            "two tokens": copy_two_token_match,
            "last value": self._copy_last_value,
            "position only": predict_by_position(self),
        }

    def _copy_last_value(self, batch: Batch) -> Tensor:
        t = batch.inputs.shape[1]
        place = torch.arange(t, device=batch.inputs.device).expand_as(batch.inputs)
        is_value = batch.inputs >= self.vocab_size // 2
        return batch.inputs.gather(1, (place * is_value).cummax(1).values)


def _gather_pairs(pairs: Tensor, motif: Tensor) -> Tensor:
    """Gather the pairs with these indices [b m] from pairs [b k l], int64 [b m l]."""
    return pairs.gather(1, motif[:, :, None].expand(-1, -1, pairs.shape[2]))

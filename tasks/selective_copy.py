"""Selective copying: a few tokens among blanks, to be repeated in order."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from tasks import counter
from tasks.base import IGNORE, Batch, Links, Predictor, Preset, Task
from tasks.bounds import MAX_SEQ_LEN, MAX_VOCAB_SIZE, check_range, option
from tasks.lazy import Tensor, torch
from tasks.shortcuts import draw_numbers, predict_by_position, predict_most_frequent

BLANK, INSERT, FIRST = range(3)
CONTENT, QUERY, EMPTY = range(3)


@dataclass(frozen=True, kw_only=True)
class SelectiveCopy(Task):
    """Repeat the tokens among blanks, in order.

    Of the first T − n positions n hold content, tokens 2 … V − 1 at random, and the rest the blank
    0; every choice of positions is equally likely. Then come n insert tokens 1; the target at the
    i-th is the i-th content token.

    With T = 12, three tokens and V = 6, row 0 of seed 0 is

    >>> batch = SelectiveCopy(seq_len=12, n_tokens=3, vocab_size=6).batch(size=1)
    >>> batch.inputs.tolist()
    [[0, 0, 3, 0, 0, 3, 0, 4, 0, 1, 1, 1]]
    >>> batch.targets.tolist()
    [[-100, -100, -100, -100, -100, -100, -100, -100, -100, 3, 3, 4]]

    Scored: the n insert tokens. Chance: 1/(V − 2).

    Links, int64 [b n] in the order of the answer: query_pos, value_pos (the content token),
    distance (query_pos − value_pos). Nothing in the row names a content token, so there is no key.

    Raises:
        ValueError: for an option out of bounds.

    Source: Gu and Dao 2023 (Mamba), § 4.1.1 and § E.1; Arjovsky, Shah and Bengio 2016 (Unitary
    Evolution Recurrent Neural Networks) with the content in front; MAD (Poli et al. 2024) has
    T = 256 and n = 16.
    """

    name: ClassVar[str] = "selective_copy"
    role_names: ClassVar[tuple[str, ...]] = ("content", "insert", "blank")
    separates: ClassVar[str] = "ordered selection"
    grows: ClassVar[tuple[str, ...]] = ()
    why_fixed: ClassVar[str] = (
        "short rows teach the model to answer by position, which fails on longer rows"
    )
    presets: ClassVar[dict[str, Preset]] = {
        "small": Preset(
            {"seq_len": 64, "n_tokens": 8, "vocab_size": 10},
            "LOG.md, small presets",
            seconds=62,
        ),
        "published": Preset(
            {"seq_len": 4096, "n_tokens": 16, "vocab_size": 16}, "Gu and Dao 2023 (Mamba), § E.1"
        ),
    }

    seq_len: int = option(256, "tokens per row")
    n_tokens: int = option(16, "content tokens to repeat")
    vocab_size: int = option(18, "size of the vocabulary; token 0 is blank, 1 the insert")

    def validate(self) -> None:
        """Validate the options."""
        check_range("seq_len", self.seq_len, 2, MAX_SEQ_LEN)
        check_range("n_tokens", self.n_tokens, 1, self.seq_len // 2, "seq_len / 2")
        check_range("vocab_size", self.vocab_size, 4, MAX_VOCAB_SIZE)

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b]) on the device of `numbers`."""
        n, t = self.n_tokens, self.seq_len
        rounds = counter.count_rounds(t - n)
        word = self.draw_words(split, numbers, seed, rounds + n)
        place = counter.draw_distinct(word[:, :rounds], n, t - n).sort(1).values
        content = counter.draw_below(word[:, rounds:], self.vocab_size - FIRST) + FIRST
        inputs = torch.full((len(numbers), t), BLANK, device=numbers.device)
        inputs.scatter_(1, place, content)
        inputs[:, t - n :] = INSERT
        targets = torch.full_like(inputs, IGNORE)
        targets[:, t - n :] = content
        roles = torch.full_like(inputs, EMPTY).scatter_(1, place, CONTENT)
        roles[:, t - n :] = QUERY
        return Batch(inputs, targets, roles, Links(partial(self._make_links, place)))

    def _make_links(self, place: Tensor) -> dict[str, Tensor]:
        """Link each insert token to its content."""
        n, t = self.n_tokens, self.seq_len
        query = torch.arange(t - n, t, device=place.device).expand_as(place)
        return {"query_pos": query, "value_pos": place, "distance": query - place}

    def oracle(self, batch: Batch) -> Tensor:
        """Return the tokens that are neither blank nor insert, in order, at the inserts."""
        answers = torch.full_like(batch.inputs, IGNORE)
        for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
            content = [token for token in row if token not in (BLANK, INSERT)]
            inserts = [position for position, token in enumerate(row) if token == INSERT]
            for position, token in zip(inserts, content, strict=True):
                answer[position] = token
        return answers

    @property
    def chance(self) -> float:
        """The accuracy of a guess among the content tokens' values."""
        return 1 / (self.vocab_size - FIRST)

    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that look right without counting the content.

        "last content" is the content token nearest to the inserts, "any content" a random one:
        1/n + (1 − 1/n)/(V − 2), right at one of n, else by chance. "most frequent content" is one
        answer for all: .19 at the defaults. "by place" answers the i-th insert with the content
        token at the most likely position of the i-th, without counting those before it: .385. A
        vote of all tokens, weighted by the probability that the i-th is there, reaches .400: about
        what position alone can select. "position only" is at chance, as is a bigram table: every
        query is the same token. What followed it before is the same token again, never an answer.
        """
        return {
            "last content": lambda batch: self._answer(batch, self._choose_last),
            "any content": lambda batch: self._answer(batch, self._choose_any),
            "most frequent content": predict_most_frequent(FIRST),
            "by place": lambda batch: self._answer(batch, self._choose_likeliest),
            "position only": predict_by_position(self),
        }

    def _answer(self, batch: Batch, choose: Callable[[Tensor], Tensor]) -> Tensor:
        """Answer at the inserts with the content tokens that `choose` picks by their positions."""
        place = (batch.inputs >= FIRST).nonzero()[:, 1].view(-1, self.n_tokens)
        answers = torch.full_like(batch.inputs, IGNORE)
        said = batch.inputs.gather(1, place.gather(1, choose(place)))
        answers[:, self.seq_len - self.n_tokens :] = said
        return answers

    def _choose_last(self, place: Tensor) -> Tensor:
        return torch.full_like(place, self.n_tokens - 1)

    def _choose_any(self, place: Tensor) -> Tensor:
        return draw_numbers("any content", place, self.n_tokens)

    def _choose_likeliest(self, place: Tensor) -> Tensor:
        # The position p in 0 … L − 1 of the i-th of n, i from 0, has probability
        # ∝ C(p, i)·C(L − 1 − p, n − 1 − i), which grows up to p = ⌊i·L/(n − 1)⌋ and falls after it:
        # the most likely content token is next to that position.
        n, room = self.n_tokens, self.seq_len - self.n_tokens
        nth = torch.arange(n, device=place.device).repeat(len(place), 1)
        after = torch.searchsorted(place, nth * room // max(n - 1, 1)).clamp(max=n - 1)
        before = (after - 1).clamp(min=0)

        def log_probability(which: Tensor) -> Tensor:
            p = place.gather(1, which)
            below, above = _count_log_ways(p, nth), _count_log_ways(room - 1 - p, n - 1 - nth)
            return below + above

        return before.where(log_probability(before) >= log_probability(after), after)

    def format_token(self, token: int) -> str:
        """Return how a token is shown: _ for a blank, ? for an insert."""
        return {BLANK: "_", INSERT: "?"}.get(token, str(token))


def _count_log_ways(n: Tensor, k: Tensor) -> Tensor:
    """Return log(n!/(n − k)!), float64: log of C(n, k), plus log k!; −∞ if k > n."""
    return torch.lgamma((n + 1).double()) - torch.lgamma((n - k + 1).double())

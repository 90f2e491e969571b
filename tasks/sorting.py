"""Sorting: numbers in random order, a marker, and the numbers from the least to the greatest."""

from dataclasses import dataclass
from typing import ClassVar

from tasks import counter
from tasks.base import IGNORE, Batch, Links, Predictor, Preset, Task
from tasks.bounds import MAX_SEQ_LEN, MAX_VOCAB_SIZE, check_range, option
from tasks.lazy import Tensor, torch
from tasks.shortcuts import look_back, predict_by_position, predict_by_token

MARKER = 0
NUMBER, MARK, ECHO, PADDING = range(4)


@dataclass(frozen=True, kw_only=True)
class Sort(Task):
    """Say numbers in ascending order, each right answer being the next input.

    A row is n = T/2 numbers in 1 … V − 1, independent and uniform, so that some are equal, the
    marker 0, and all but the greatest in ascending order. The targets from the marker on are the
    numbers in that order, equal ones as often as they occur.

    With T = 12 and V = 7, row 0 of seed 0 is

    >>> batch = Sort(seq_len=12, vocab_size=7).batch(size=1)
    >>> batch.inputs.tolist()
    [[3, 2, 5, 6, 2, 1, 0, 1, 2, 2, 3, 5]]
    >>> batch.targets[:, 6:].tolist()
    [[1, 2, 2, 3, 5, 6]]

    The number 2 occurs twice: after the first 2 comes another, after the second comes 3.

    Scored: the marker and the tokens after it, n in all. Chance: 1/(V − 1).

    Links, int64 [b n] in the order of the answer: query_pos, value_pos (the answer's position among
    the numbers, equal ones from left to right) and distance (query_pos − value_pos). An answer
    depends on all numbers, not on what stands beside it: there is no key.

    Raises:
        ValueError: for an option out of bounds.

    Source: Delétang et al. 2023 (Neural Networks and the Chomsky Hierarchy), bucket sort: five
    symbols, up to 40. CogScale (arXiv 2605.19758), sorting.

    Departs: CogScale's symbols each come with their position in the answer, a permutation without
    ties.
    """

    name: ClassVar[str] = "sort"
    role_names: ClassVar[tuple[str, ...]] = ("number", "marker", "echo", "padding")
    separates: ClassVar[str] = "operations on the set of all tokens; counting"
    presets: ClassVar[dict[str, Preset]] = {
        "small": Preset({"seq_len": 32, "vocab_size": 32}, "LOG.md, small presets", seconds=160),
        "published": Preset(
            {"seq_len": 80, "vocab_size": 6}, "Delétang et al. 2023: 40 of five symbols"
        ),
    }

    seq_len: int = option(128, "tokens per row; even")
    vocab_size: int = option(64, "size of the vocabulary; token 0 is the marker")

    def validate(self) -> None:
        """Validate the options."""
        check_range("seq_len", self.seq_len, 2, MAX_SEQ_LEN)
        if self.seq_len % 2:
            raise ValueError(f"seq_len={self.seq_len}: must be even, each number is said twice")
        check_range("vocab_size", self.vocab_size, 3, MAX_VOCAB_SIZE)

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b]) on the device of `numbers`."""
        n = self.seq_len // 2
        word = self.draw_words(split, numbers, seed, n)
        given = counter.draw_below(word, self.vocab_size - 1) + 1
        answer, place = given.sort(dim=1, stable=True)
        inputs = torch.cat((given, torch.full_like(given[:, :1], MARKER), answer[:, :-1]), 1)
        targets = torch.cat((torch.full_like(given, IGNORE), answer), 1)
        roles = torch.full_like(inputs, ECHO)
        roles[:, :n], roles[:, n] = NUMBER, MARK
        return Batch(inputs, targets, roles, Links(lambda: self._make_links(place)))

    def _make_links(self, place: Tensor) -> dict[str, Tensor]:
        """Link each query to its answer among the numbers."""
        n = self.seq_len // 2
        query = torch.arange(n, 2 * n, device=place.device).expand_as(place)
        return {"query_pos": query, "value_pos": place, "distance": query - place}

    def oracle(self, batch: Batch) -> Tensor:
        """Return the numbers before the marker in ascending order."""
        answers = torch.full_like(batch.inputs, IGNORE)
        for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
            end = row.index(MARKER)
            for i, number in enumerate(sorted(row[:end])):
                answer[end + i] = number
        return answers

    @property
    def chance(self) -> float:
        """The accuracy of a guess among the numbers that there are."""
        return 1 / (self.vocab_size - 1)

    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that look right without counting the numbers.

        "next greater" is the least number of the row that is greater than the token, which leaves
        out repetitions: right for the first of equal numbers, .63 at the defaults, .79 at "small".
        "last token" is the number once more, right for all others. "bigram" is what most often
        follows the token in order: .41, and .90 at "published", where numbers occur eight times.
        "position only" is the most frequent answer at the position, .15, and .78 at "published".
        "unsorted" is the numbers as they came, near chance.
        """
        return {
            "next greater": _find_next_greater,
            "last token": lambda batch: batch.inputs,
            "bigram": predict_by_token(self),
            "position only": predict_by_position(self),
            "unsorted": look_back(self.seq_len // 2),
        }

    def format_token(self, token: int) -> str:
        """Return how a token is shown: the marker is |."""
        return "|" if token == MARKER else str(token)


def _find_next_greater(batch: Batch) -> Tensor:
    """Return the least number before the marker that is greater than the token (-100 if none)."""
    answers = torch.full_like(batch.inputs, IGNORE)
    for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
        end = row.index(MARKER)
        for position in range(end, len(row)):
            greater = [number for number in row[:end] if number > row[position]]
            answer[position] = min(greater, default=IGNORE)
    return answers

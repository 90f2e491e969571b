"""Palindromes: a string, a marker, and the string again from its end to its beginning."""

from dataclasses import dataclass
from typing import ClassVar

from tasks import counter
from tasks.base import IGNORE, Batch, Links, Predictor, Preset, Task
from tasks.bounds import MAX_SEQ_LEN, MAX_VOCAB_SIZE, check_range, option
from tasks.lazy import Tensor, torch
from tasks.shortcuts import copy_latest_match, look_back, predict_by_position

MARKER = 0
STRING, MARK, ECHO, PADDING = range(4)


@dataclass(frozen=True, kw_only=True)
class Palindrome(Task):
    """Repeat a string backwards, token by token, each right answer being the next input.

    A row is a string s₁ … s_n of n = T/2 tokens 1 … V − 1, independent and uniform, the marker 0,
    and s_n … s₂. The target is s_n at the marker, and at each later token the one before it in the
    string.

    With T = 8 and V = 9, row 0 of seed 0 is

    >>> batch = Palindrome(seq_len=8, vocab_size=9).batch(size=1)
    >>> batch.inputs.tolist()
    [[5, 8, 3, 3, 0, 3, 3, 8]]
    >>> batch.targets.tolist()
    [[-100, -100, -100, -100, 3, 3, 8, 5]]

    The string is 5 8 3 3. Its 3 is preceded once by 8 and once by 3: the last token alone does not
    tell which.

    Scored: the marker and the tokens after it, n in all. Chance: 1/(V − 1).

    Links, int64 [b n] in the order of the answer: query_pos, value_pos (the answer's position in
    the string) and distance (query_pos − value_pos = 1, 3, …). The token that a query repeats
    stands after its answer, not before it: there is no key.

    Raises:
        ValueError: for an option out of bounds.

    Source: Kimi Linear (arXiv 2510.26692), § 5.1, at T = 256 to 2,048; the size of its vocabulary
    is not published. Delétang et al. 2023 (Neural Networks and the Chomsky Hierarchy), reverse
    string.

    Departs: the marker is scored, too.
    """

    name: ClassVar[str] = "palindrome"
    role_names: ClassVar[tuple[str, ...]] = ("string", "marker", "echo", "padding")
    separates: ClassVar[str] = "a pointer that moves backwards"
    presets: ClassVar[dict[str, Preset]] = {
        "small": Preset({"seq_len": 32, "vocab_size": 16}, "LOG.md, small presets", seconds=99),
        "published": Preset({"seq_len": 1024}, "Kimi Linear (arXiv 2510.26692), § 5.1"),
    }

    seq_len: int = option(256, "tokens per row; even")
    vocab_size: int = option(64, "size of the vocabulary; token 0 is the marker")

    def validate(self) -> None:
        """Validate the options."""
        check_range("seq_len", self.seq_len, 2, MAX_SEQ_LEN)
        if self.seq_len % 2:
            raise ValueError(f"seq_len={self.seq_len}: must be even, the string is said twice")
        check_range("vocab_size", self.vocab_size, 3, MAX_VOCAB_SIZE)

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b]) on the device of `numbers`."""
        n = self.seq_len // 2
        word = self.draw_words(split, numbers, seed, n)
        string = counter.draw_below(word, self.vocab_size - 1) + 1
        answer = string.flip(1)
        inputs = torch.cat((string, torch.full_like(string[:, :1], MARKER), answer[:, :-1]), 1)
        targets = torch.cat((torch.full_like(string, IGNORE), answer), 1)
        roles = torch.full_like(inputs, ECHO)
        roles[:, :n], roles[:, n] = STRING, MARK
        return Batch(inputs, targets, roles, Links(lambda: self._make_links(string)))

    def _make_links(self, string: Tensor) -> dict[str, Tensor]:
        """Link each query to its answer in the string."""
        n = self.seq_len // 2
        value = torch.arange(n - 1, -1, -1, device=string.device).expand_as(string)
        query = 2 * n - 1 - value
        return {"query_pos": query, "value_pos": value, "distance": query - value}

    def oracle(self, batch: Batch) -> Tensor:
        """Return the tokens before the marker from the last to the first."""
        answers = torch.full_like(batch.inputs, IGNORE)
        for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
            end = row.index(MARKER)
            for i, token in enumerate(reversed(row[:end])):
                answer[end + i] = token
        return answers

    @property
    def chance(self) -> float:
        """The accuracy of a guess among the tokens that are not the marker."""
        return 1 / (self.vocab_size - 1)

    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that look right without following the string back.

        "before the token" answers with what stood before the token's first occurrence, and errs
        where tokens recur: .45 at the defaults, .69 at "small". "before two tokens" looks for the
        query and the token before it, turned round: .99 and .98. So looking up a few tokens nearly
        solves random strings, as in `copy`: only strings whose n-grams recur, of few symbols or
        longer, ask for a pointer. "forwards" is the string from its beginning, "most recent match"
        copies what last followed the token, "last token" is the input itself: with "position only"
        they are near chance.
        """
        return {
            "before the token": lambda batch: self._look_before(batch, 1),
            "before two tokens": lambda batch: self._look_before(batch, 2),
            "forwards": look_back(self.seq_len // 2),
            "most recent match": copy_latest_match,
            "last token": lambda batch: batch.inputs,
            "position only": predict_by_position(self),
        }

    def _look_before(self, batch: Batch, count: int) -> Tensor:
        """Answer with what stood before the first occurrence of the last tokens, turned round.

        Up to `count` tokens are compared: fewer where so many occur nowhere in the string.
        """
        n, answers = self.seq_len // 2, torch.full_like(batch.inputs, IGNORE)
        for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
            before: dict[tuple[int, ...], int] = {}
            for size in range(1, count + 1):
                for i in range(1, n + 2 - size):
                    before.setdefault(tuple(row[i : i + size]), row[i - 1])
            for query in range(n, 2 * n):
                said = tuple(row[query : query - count : -1])
                found = [said[:size] for size in range(count, 0, -1) if said[:size] in before]
                answer[query] = before[found[0]] if found else IGNORE
        return answers

    def format_token(self, token: int) -> str:
        """Return how a token is shown: the marker is |."""
        return "|" if token == MARKER else str(token)

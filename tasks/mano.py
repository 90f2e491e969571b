"""Mano: arithmetic expressions modulo a number, in prefix notation; what is their value?"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from math import isqrt
from typing import ClassVar, Literal, get_args

from tasks import counter
from tasks.base import IGNORE, Batch, Links, Predictor, Preset, Task
from tasks.bounds import MAX_SEQ_LEN, check_choice, check_range, option
from tasks.lazy import Tensor, torch

LENGTH, OPERATOR, NUMBER, QUERY, PADDING = range(5)
MAX_LENGTH = 32
SIGNS = "+-*/"
FIRST_SIGN = 1 + MAX_LENGTH
EQUALS = FIRST_SIGN + len(SIGNS)
FIRST_NUMBER = EQUALS + 1
"""Smaller tokens are 0, the padding, the number of operations 1 … 32, the four signs and =."""
MAX_MODULUS = 2**15
Operators = Literal["+", "+-", "+-*", "+-*/"]


@dataclass(frozen=True, kw_only=True)
class Mano(Task):
    """Give the value of an expression modulo n, without writing down what lies between.

    A row is the token ℓ, an expression of ℓ operations in prefix notation, a sign and two
    expressions, and the token =. ℓ is uniform in 1 … L. Of the ℓ − 1 operations below a sign its
    left side has 0 … ℓ − 1, uniform; signs are uniform in `operators`, numbers in 0 … n − 1. What
    would divide by 0 multiplies instead. Token 0 fills the row.

    With L = 3 and numbers modulo 5, row 0 of seed 0 is

    >>> task = Mano(seq_len=10, length=3, modulus=5)
    >>> batch = task.batch(size=1)
    >>> " ".join(task.to_str_tokens(batch.inputs[0]))
    'l3 + 2 * 2 - 4 1 = _'
    >>> task.format_token(int(batch.targets[0, 8]))
    '3'

    The value is 2 + 2·(4 − 1) = 8, modulo 5.

    Scored: the token =. Chance: 1/n.

    Links, int64 [b q]: query_pos and operations (ℓ).

    Raises:
        ValueError: for an option out of bounds, or for division modulo a number that is not prime.

    Source: Allen-Zhu 2025 (Physics of Language Models, part 4.1), Mano, as its published generator
    draws it: n = 23, + − *, L = 10, 13 or 16; its test has ℓ = L (`exact_length`).

    Departs: one token a sign, where the generator takes one of two at random; rows have no first
    token. Division, which the paper leaves out, draws no expression anew.
    """

    name: ClassVar[str] = "mano"
    role_names: ClassVar[tuple[str, ...]] = ("length", "operator", "number", "query", "padding")
    separates: ClassVar[str] = "known tables and their composition, in one pass"
    grows: ClassVar[tuple[str, ...]] = ("seq_len", "length")
    presets: ClassVar[dict[str, Preset]] = {
        "small": Preset(
            {"seq_len": 7, "length": 2, "modulus": 5},
            "LOG.md, small presets",
            stack="AM*3",
            seconds=233,
        ),
        "published": Preset({"seq_len": 35, "length": 16}, "Allen-Zhu 2025, its longest"),
    }
    evaluations: ClassVar[dict[str, tuple[int, ...]]] = {"exact_length": (1, 2, 4, 8)}

    seq_len: int = option(32, "tokens per row")
    vocab_size: int = field(init=False, default=0)
    length: int = option(13, "most operations of an expression")
    exact_length: int | None = option(None, "operations of every expression", "1 to length")
    modulus: int = option(23, "numbers are 0 to modulus − 1; a prime where there is division")
    operators: Operators = option("+-*", "the operations")

    def validate(self) -> None:
        """Validate the options."""
        check_range("seq_len", self.seq_len, 5, MAX_SEQ_LEN, "room for one operation")
        most = min(MAX_LENGTH, (self.seq_len - 3) // 2)
        check_range("length", self.length, 1, most, "(seq_len − 3) / 2")
        if self.exact_length is not None:
            check_range("exact_length", self.exact_length, 1, self.length, "length")
        check_choice("operators", self.operators, get_args(Operators))
        check_range("modulus", self.modulus, 2, MAX_MODULUS)
        divisors = (d for d in range(2, isqrt(self.modulus) + 1) if self.modulus % d == 0)
        if "/" in self.operators and (divisor := next(divisors, None)):
            raise ValueError(
                f"modulus={self.modulus}: must be prime where operators have /; {divisor} divides "
                "it"
            )
        object.__setattr__(self, "vocab_size", FIRST_NUMBER + self.modulus)

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b]) on the device of `numbers`."""
        n, t, places, device = self.modulus, self.seq_len, 2 * self.length + 1, numbers.device
        sizes = [1, places, places]
        word = self.draw_words(split, numbers, seed, sum(sizes)).split(sizes, 1)
        length = 1 + counter.draw_below(word[0], self.length)
        if self.exact_length is not None:
            length = torch.full_like(length, self.exact_length)

        # How many operations the expression at each place has, and where its right side begins.
        operations = torch.zeros(len(numbers), places + 1, dtype=torch.int64, device=device)
        operations[:, :1] = length
        right_at = torch.full_like(operations, places)
        for place in range(places):
            below = operations[:, place : place + 1]
            left = counter.draw_below(word[1][:, place : place + 1], below)
            right = (place + 2 + 2 * left).where(below > 0, places)
            operations[:, place + 1 : place + 2] += left
            operations.scatter_(1, right, (below - 1 - left).clamp(min=0))
            right_at[:, place : place + 1] = right
        operations, right_at = operations[:, :places], right_at[:, :places]

        # Values from right to left: those of both sides are there before their sign's.
        sign = counter.draw_below(word[2], len(self.operators))
        value = torch.zeros(len(numbers), places + 1, dtype=torch.int64, device=device)
        value[:, :places] = counter.draw_below(word[2], n)
        inverse = _list_inverses(n, device) if "/" in self.operators else None
        for place in reversed(range(places)):
            left = value[:, place + 1]
            right = value.gather(1, right_at[:, place, None])[:, 0]
            found = [left + right, left - right, left * right][: len(self.operators)]
            if inverse is not None:
                found.append(left * inverse[right])
                sign[:, place] -= ((sign[:, place] == 3) & (right == 0)).long()
            result = torch.stack(found).gather(0, sign[None, :, place])[0] % n
            value[:, place] = result.where(operations[:, place] > 0, value[:, place])

        # The length, the expression, =; what lies behind is cut off.
        end = 2 * length + 2
        expression = (sign + FIRST_SIGN).where(operations > 0, value[:, :places] + FIRST_NUMBER)
        kind = NUMBER - (operations > 0).long()
        behind = torch.arange(t, device=device) > end
        inputs, roles = (
            torch.nn.functional.pad(torch.cat(parts, 1), (0, t - places - 1))
            .scatter(1, end, last)
            .masked_fill(behind, fill)
            for parts, last, fill in (
                ((length, expression), EQUALS, 0),
                ((torch.full_like(length, LENGTH), kind), QUERY, PADDING),
            )
        )
        targets = torch.full_like(inputs, IGNORE).scatter(1, end, value[:, :1] + FIRST_NUMBER)
        return Batch(
            inputs, targets, roles, Links(lambda: {"query_pos": end, "operations": length})
        )

    def oracle(self, batch: Batch) -> Tensor:
        """Return the value of each row's expression, by a stack."""
        return self._evaluate(batch, _fold_prefix)

    def _evaluate(
        self, batch: Batch, fold: Callable[[list[str | int], Callable[[str, int, int], int]], int]
    ) -> Tensor:
        """Answer with what `fold` makes of the signs and numbers of each row."""
        answers = torch.full_like(batch.inputs, IGNORE)
        for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
            end = row.index(EQUALS)
            words = [
                SIGNS[token - FIRST_SIGN] if token < EQUALS else token - FIRST_NUMBER
                for token in row[1:end]
            ]
            answer[end] = FIRST_NUMBER + fold(words, self._apply)
        return answers

    def _apply(self, sign: str, left: int, right: int) -> int:
        """Carry out one operation; a number without an inverse divides as 0 does."""
        if sign == "/":
            right, sign = pow(right, -1, self.modulus) if right else 0, "*"
        found = {"+": left + right, "-": left - right, "*": left * right}
        return found[sign] % self.modulus

    @property
    def chance(self) -> float:
        """The accuracy of a guess among the numbers."""
        return 1 / self.modulus

    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that look right without following the nesting.

        "left to right" combines the numbers by the signs in their order: always right at ℓ = 1, or
        where all signs are +; .75 at "small", .15 at the defaults. "most frequent value" is always
        0, which products often are: .25 and .07. "last value" repeats the last number, which
        multiplies into 0 as often: .24 and .05.
        """
        return {
            "left to right": lambda batch: self._evaluate(batch, _fold_left_to_right),
            "last value": lambda batch: batch.inputs.roll(1, 1),
            "most frequent value": lambda batch: torch.full_like(batch.inputs, FIRST_NUMBER),
        }

    def format_token(self, token: int) -> str:
        """Return how a token is shown: ℓ as l1 … l32, signs, =, numbers; _ for padding."""
        if token < FIRST_SIGN:
            return f"l{token}" if token else "_"
        if token < EQUALS:
            return SIGNS[token - FIRST_SIGN]
        return "=" if token == EQUALS else str(token - FIRST_NUMBER)


@lru_cache(maxsize=16)
def _list_inverses(modulus: int, device: "torch.device") -> Tensor:
    """Return the inverse of each number modulo a prime; 0 for 0."""
    inverses = [0, *(pow(number, -1, modulus) for number in range(1, modulus))]
    return torch.tensor(inverses, device=device)


def _fold_prefix(words: list[str | int], apply: Callable[[str, int, int], int]) -> int:
    """Return the value of an expression in prefix notation."""
    stack: list[int] = []
    for word in reversed(words):
        stack.append(word if isinstance(word, int) else apply(word, stack.pop(), stack.pop()))
    return stack.pop()


def _fold_left_to_right(words: list[str | int], apply: Callable[[str, int, int], int]) -> int:
    """Combine the numbers from left to right by the signs in their order."""
    signs = [word for word in words if isinstance(word, str)]
    first, *others = (word for word in words if isinstance(word, int))
    for sign, number in zip(signs, others, strict=True):
        first = apply(sign, first, number)
    return first

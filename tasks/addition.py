"""Addition: two numbers and an equals sign; what is their sum, digit by digit?"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from tasks import counter
from tasks.base import IGNORE, Batch, Links, Predictor, Preset, Task
from tasks.bounds import MAX_SEQ_LEN, check_choice, check_range, option
from tasks.lazy import Tensor, torch
from tasks.shortcuts import predict_by_position, predict_by_token

NUMBER, PLUS, EQUALS, SUM, PADDING = range(5)
Order = Literal["reversed", "plain", "sum-reversed"]
MAX_BASE = 1024
SHORT = 5
"""The longest number has this many times the digits of the shortest, if `shortest` is not given."""


@dataclass(frozen=True, kw_only=True)
class Addition(Task):
    """Add two numbers of equally many digits, each right digit being the next input.

    Numbers a and b have n digits each in base B, n uniform in shortest … longest = (T − 2)/3, and
    may begin with zeros; their sum s has n + 1:

        a₁ … a_n + b₁ … b_n = s₁ … s_n                   s_n₊₁ is the last target

    `order` says which digit is first: the lowest of all three ("reversed"), the highest ("plain"),
    or the highest of a and b and the lowest of the sum ("sum-reversed"). With the lowest first,
    a digit of the sum needs two digits and what was carried so far; with the highest first, it
    needs all lower places. Tokens 0 … B − 1 are digits, B is +, B + 1 is =, B + 2 pads.

    The digits of a place sum to B − 1 with probability `p_chain`, so that a carry from below goes
    through; otherwise they are uniform among all other pairs. With 1/B all digits are independent
    and uniform, and carries hardly ever go far.

    With T = 11 and numbers of two or three digits, row 0 of seed 0 is

    >>> batch = Addition(seq_len=11, shortest=2).batch(size=1)
    >>> batch.inputs.tolist()
    [[1, 6, 5, 10, 2, 3, 3, 11, 3, 9, 8]]
    >>> batch.targets.tolist()
    [[-100, -100, -100, -100, -100, -100, -100, 3, 9, 8, 0]]
    >>> batch.links["chain"].tolist()
    [[0, 0, 1, 0]]

    561 + 332 = 0893, all with the lowest digit first. 6 + 3 is 9: a carry would go through it into
    the place of 5 + 3.

    Scored: from = on, the n + 1 digits of the sum. Chance: 1/B.

    Links, int64 [b q] in the order of the answer: query_pos; first_pos and second_pos, the two
    digits of the same place (−1 for the highest digit of the sum, which is the carry alone); and
    chain, how many places in a row below it a carry would go through. −1 past a row's answer.

    Raises:
        ValueError: for an option out of bounds.

    Source: Lee et al. 2024 (Teaching Arithmetic to Small Transformers), plain and with the sum
    reversed; Zhou et al. 2024 (Transformers Can Achieve Length Generalization But Not Robustly),
    all reversed, trained on 1 to 40 digits and tested on 100.

    Departs: a row is one sum; digits are tokens, without index hints or blanks between them; the
    sum always has n + 1 digits.
    """

    name: ClassVar[str] = "addition"
    role_names: ClassVar[tuple[str, ...]] = ("number", "plus", "equals", "sum", "padding")
    separates: ClassVar[str] = "carries; length generalisation"
    presets: ClassVar[dict[str, Preset]] = {
        "small": Preset(
            {"seq_len": 20, "shortest": 6, "base": 5}, "LOG.md, small presets", seconds=100
        ),
        "published": Preset(
            {"seq_len": 122, "shortest": 1, "p_chain": 0.1},
            "Zhou et al. 2024: numbers of 1 to 40 digits, all reversed",
        ),
    }
    evaluations: ClassVar[dict[str, tuple[int, ...]]] = {"seq_len": (32, 62, 122, 302)}

    seq_len: int = option(62, "tokens per row")
    shortest: int | None = option(None, "digits of the shortest number", "a fifth of the longest")
    base: int = option(10, "base of the numbers")
    order: Order = option("reversed", "which digit comes first")
    p_chain: float = option(0.5, "probability that a place passes a carry on, in [0, 1]")
    vocab_size: int = field(init=False, default=13)

    def validate(self) -> None:
        """Validate the options, and set vocab_size to the digits and three signs."""
        check_choice("order", self.order, get_args(Order))
        check_range("base", self.base, 2, MAX_BASE)
        check_range("seq_len", self.seq_len, 5, MAX_SEQ_LEN, "two numbers of a digit and a sum")
        if self.shortest is not None:
            check_range("shortest", self.shortest, 1, self.longest, "(seq_len − 2) / 3")
        check_range("p_chain", self.p_chain, 0, 1)
        object.__setattr__(self, "vocab_size", self.base + 3)

    @property
    def longest(self) -> int:
        """The number of digits of the longest numbers that a row has room for."""
        return (self.seq_len - 2) // 3

    @property
    def least(self) -> int:
        """The number of digits of the shortest numbers."""
        return max(1, self.longest // SHORT) if self.shortest is None else self.shortest

    def generate(self, split: str, numbers: Tensor, seed: int) -> Batch:
        """Build the rows with these numbers (int64 [b]) on the device of `numbers`."""
        longest, position = self.longest, torch.arange(self.seq_len, device=numbers.device)
        word = self.draw_words(split, numbers, seed, 1 + 2 * longest)
        n = counter.draw_below(word[:, :1], longest - self.least + 1) + self.least
        chained, pair = word[:, 1::2], word[:, 2::2]
        first, second, through = self._draw_digits(chained, pair)
        # Place p of the numbers is worth base^p; places from n on are empty.
        used = position[:longest] < n
        first, second = (digit.where(used, 0) for digit in (first, second))
        total = self._add(first, second, through & used)

        place = position - 2 * n - 1  # of the digit of the sum that is the input there
        is_first, is_second = position < n, (position > n) & (place < 0)
        is_sum, scored = (place > 0) & (place <= n), (place >= 0) & (place <= n)
        low_first, sum_low_first = self.order == "reversed", self.order != "plain"

        def read(digits: Tensor, nth: Tensor, count: Tensor, low: bool) -> Tensor:
            at = nth if low else count - 1 - nth
            return digits.gather(1, at.clamp(0, digits.shape[1] - 1))

        inputs = torch.full_like(place, self.base + 2)
        inputs = read(first, position.expand_as(place), n, low_first).where(is_first, inputs)
        inputs = inputs.masked_fill(position == n, self.base).masked_fill(place == 0, self.base + 1)
        inputs = read(second, position - n - 1, n, low_first).where(is_second, inputs)
        inputs = read(total, place - 1, n + 1, sum_low_first).where(is_sum, inputs)
        targets = read(total, place, n + 1, sum_low_first).where(scored, IGNORE)
        roles = torch.full_like(place, PADDING).masked_fill(is_first | is_second, NUMBER)
        for role, there in ((PLUS, position == n), (EQUALS, place == 0), (SUM, is_sum)):
            roles.masked_fill_(there, role)

        def links() -> dict[str, Tensor]:
            nth = torch.arange(longest + 1, device=numbers.device)
            worth = nth if sum_low_first else n - nth
            at = worth if low_first else n - 1 - worth
            asked, paired = nth <= n, (worth >= 0) & (worth < n)
            # Carries go through places in a row: count back to the last that stops them.
            stops = (nth[1:] * ~(through & used)).cummax(1).values
            run = torch.nn.functional.pad(nth[1:] - stops, (1, 0))
            chain = run.gather(1, worth.expand_as(run).clamp(min=0))
            return {
                "query_pos": (2 * n + 1 + nth).where(asked, -1),
                "first_pos": at.where(paired, -1).expand_as(run),
                "second_pos": (n + 1 + at).where(paired, -1),
                "chain": chain.where(asked, -1),
            }

        return Batch(inputs, targets, roles, Links(links))

    def _draw_digits(self, chained: Tensor, pair: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw both digits of each place [b p], and whether a carry goes through it."""
        through = counter.draw_truth(chained, self.p_chain)
        drawn = counter.draw_below(pair, self.base * (self.base - 1))
        first, other = drawn // (self.base - 1), drawn % (self.base - 1)
        partner = self.base - 1 - first
        return first, partner.where(through, other + (other >= partner)), through

    def _add(self, first: Tensor, second: Tensor, through: Tensor) -> Tensor:
        """Return the digits of the sum [b p+1], lowest first.

        What enters a place was made at the last place below it that a carry does not go through.
        """
        made = first + second >= self.base
        place = torch.arange(first.shape[1], device=first.device).expand_as(first)
        last = place.where(~through, -1).cummax(1).values
        carried = made.gather(1, last.clamp(min=0)) & (last >= 0)
        enters = torch.nn.functional.pad(carried, (1, 0)).long()
        return (torch.nn.functional.pad(first + second, (0, 1)) + enters) % self.base

    def oracle(self, batch: Batch) -> Tensor:
        """Return the digits of the sum, by adding the two numbers."""
        answers = torch.full_like(batch.inputs, IGNORE)
        for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
            n = row.index(self.base)
            numbers = row[:n], row[n + 1 : 2 * n + 1]
            low_first = self.order == "reversed"
            total = sum(self._read_number(d if low_first else d[::-1]) for d in numbers)
            digits = [total // self.base**place % self.base for place in range(n + 1)]
            for nth, digit in enumerate(digits[::-1] if self.order == "plain" else digits):
                answer[2 * n + 1 + nth] = digit
        return answers

    def _read_number(self, digits: list[int]) -> int:
        """Return the number with these digits, lowest first."""
        return sum(digit * self.base**place for place, digit in enumerate(digits))

    @property
    def chance(self) -> float:
        """The accuracy of a guess among the digits."""
        return 1 / self.base

    def shortcuts(self) -> dict[str, Predictor]:
        """Return predictors that look right without carrying on.

        "no carry" adds the two digits of the place alone, "one place back" carries from the place
        below only, "two places back" from the two below: .58, .81 and .91 at the defaults, and .54,
        .96 and .996 with uniform digits (`p_chain` .1), which hardly tell adding from looking two
        places back. Places that pass carries on give runs of nines and zeros: "bigram", what is
        most often right after the token, scores .41, and "position only" .31.
        """
        return {
            "no carry": lambda batch: self._add_nearby(batch, 0),
            "one place back": lambda batch: self._add_nearby(batch, 1),
            "two places back": lambda batch: self._add_nearby(batch, 2),
            "position only": predict_by_position(self),
            "bigram": predict_by_token(self),
        }

    def _add_nearby(self, batch: Batch, back: int) -> Tensor:
        """Add the digits of each place and of so many places below it, from nothing."""
        answers = torch.full_like(batch.inputs, IGNORE)
        for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
            n = row.index(self.base)
            first, second = row[:n], row[n + 1 : 2 * n + 1]
            if self.order != "reversed":
                first, second = first[::-1], second[::-1]
            for place in range(n + 1):
                low = max(0, place - back)
                near = sum(self._read_number(d[low : place + 1]) for d in (first, second))
                nth = n - place if self.order == "plain" else place
                answer[2 * n + 1 + nth] = near // self.base ** (place - low) % self.base
        return answers

    def format_token(self, token: int) -> str:
        """Return how a token is shown: a digit as a number, and +, = and _ for padding."""
        return str(token) if token < self.base else "+=_"[token - self.base]

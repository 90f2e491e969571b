"""What reading a sum costs: how many answers other writes hide, and what width prevents it."""

import math
from dataclasses import dataclass
from itertools import count

from lab.constructions.codes import welch

ALLOWED = 0.25
"""Largest bound on the share of wrong answers at which weights are set; about a hundredth of the
answers is then wrong."""


@dataclass(frozen=True)
class SuperposedMemory:
    """A sum of writes, each the outer product of a key's code and an answer's.

    A query reads its own answer once, and each of w other answers times the product of the two
    keys. So its own answer leads any other by 1, with noise of variance 2 w κ² ν². Here κ and ν are
    Welch's bounds: no codes of that width have smaller root mean square products. The product of
    two answers adds ν² to the variance; that of two keys adds κ² where the other answer is written.

    Attributes:
        n_keys: how many keys there are.
        n_answers: how many answers.
        writes: writes other than the right one; a write of weight w counts w² times.
    """

    n_keys: int
    n_answers: int
    writes: int

    def bound_misses(self, key_width: int, answer_width: int, own: float = 1.0) -> float:
        """Return a bound on the expected share of wrong answers, as if all products were normal.

        Args:
            key_width: channels of the keys' codes.
            answer_width: channels of the answers' codes.
            own: product of a key with itself; less than 1 where it is rotated.
        """
        key = welch(self.n_keys, key_width) ** 2
        answer = welch(self.n_answers, answer_width) ** 2
        noise = self.compute_noise(key_width, answer_width) ** 2
        written = self.writes * _compute_tail(own, noise + key + answer)
        others = (self.n_answers - 1) * _compute_tail(own, noise + answer)
        return min(1.0, written + others)

    def compute_noise(self, key_width: int, answer_width: int) -> float:
        """Return the standard deviation of what other writes add to an answer's lead."""
        key, answer = welch(self.n_keys, key_width), welch(self.n_answers, answer_width)
        return math.sqrt(2 * self.writes) * key * answer

    def find_needed_width(self) -> int:
        """Return the least width of both codes at which at most one answer in 1,000 is missed."""
        return next(width for width in count(2) if self.bound_misses(width, width) <= 0.001)


def _compute_tail(lead: float, variance: float) -> float:
    """Return how often a normal deviate of that variance exceeds the lead."""
    return 0.5 * math.erfc(lead / math.sqrt(2 * variance)) if variance > 0 else 0.0

"""What a sum over all writes costs: how many answers the other writes hide, and what width helps."""

import math
from dataclasses import dataclass

from lab.oracles.codes import welch

ALLOWED = 0.05
"""Share of answers expected to be wrong above which no weights are set; in fact fewer are."""
WIDEST = 4096
"""The largest width that is tried."""


@dataclass(frozen=True)
class Memory:
    """A sum of writes, each a key's code times an answer's.

    A query reads its own answer once, and each of w others times the product of the two keys. So an
    answer leads another by 1 beside noise whose variance is 2 w κ² ν², where κ and ν are Welch's
    bounds: no codes of that width have smaller root mean square products. Another written answer
    adds the product of its key, κ², and any other answer that of its code, ν².

    Attributes:
        n_keys: how many keys there are.
        n_answers: likewise answers.
        writes: others beside the right one; a write of weight w counts w² times.
    """

    n_keys: int
    n_answers: int
    writes: int

    def misses(self, key_width: int, answer_width: int, own: float = 1.0) -> float:
        """Return the expected share of wrong answers, at most: competitors add up, codes are normal.

        Args:
            key_width: channels of the keys' codes.
            answer_width: channels of the answers' codes.
            own: product of a key with itself, less than 1 where rotation turned it.
        """
        key = welch(self.n_keys, key_width) ** 2
        answer = welch(self.n_answers, answer_width) ** 2
        noise = 2 * self.writes * key * answer
        written = self.writes * _beyond(own, noise + key + answer)
        others = (self.n_answers - 1) * _beyond(own, noise + answer)
        return min(1.0, written + others)

    def needed_width(self) -> int:
        """Return the least width, the same for keys and answers, at which one answer in 1,000 is missed."""
        for width in range(2, WIDEST):
            if self.misses(width, width) <= 0.001:
                return width
        return WIDEST


def _beyond(lead: float, variance: float) -> float:
    """Return how often a normal deviate of that variance exceeds the lead."""
    return 0.5 * math.erfc(lead / math.sqrt(2 * variance)) if variance > 0 else 0.0

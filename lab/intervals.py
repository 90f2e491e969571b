"""Wilson's 95 % interval of a share, for trials that are independent or clustered in rows."""

import math
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

Z95 = 1.959963984540054
"""The normal distribution's 97.5 % point."""


def wilson(share: float, count: int | float) -> tuple[float, float]:
    """Return the 95 % interval of a share among `count` independent trials.

        (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n)

    Source: Wilson, J. Am. Stat. Assoc. 22 (1927), 209.
    """
    square = Z95**2 / count
    middle = share + square / 2
    half = Z95 * math.sqrt(share * (1 - share) / count + square / (4 * count))
    low, high = (middle - half) / (1 + square), (middle + half) / (1 + square)
    # Rounding might exclude the share itself when it is 0 or 1.
    return max(0.0, min(share, low)), min(1.0, max(share, high))


def clustered_wilson(right: Int[Tensor, " b"], scored: Int[Tensor, " b"]) -> tuple[float, float]:
    """Return the 95 % interval of the share of right answers that are clustered in rows.

    Args:
        right: right answers of each row.
        scored: answers of each row.
    """
    counts = RowCounts()
    counts.add(right, scored)
    return counts.find_interval()


@dataclass
class RowCounts:
    """What to know of any number of rows for the share of their answers that are right.

    With h right answers of s in a row, and n = Σs, p = Σh / n over all m rows, the squared error of
    p between rows is m/(m−1) · Σ(h − ps)² / n², where Σ(h − ps)² = Σh² − 2p Σhs + p² Σs².

    Attributes:
        rows: m.
        right: Σh.
        scored: Σs.
        right_squares: Σh².
        products: Σhs.
        scored_squares: Σs².
    """

    rows: int = 0
    right: int = 0
    scored: int = 0
    right_squares: int = 0
    products: int = 0
    scored_squares: int = 0

    def add(self, right: Int[Tensor, " b"], scored: Int[Tensor, " b"]) -> None:
        """Count the right and all answers of each of some rows."""
        self.rows += len(scored)
        self.right += int(right.sum())
        self.scored += int(scored.sum())
        self.right_squares += int((right * right).sum())
        self.products += int((right * scored).sum())
        self.scored_squares += int((scored * scored).sum())

    @property
    def share(self) -> float:
        """The share of right answers."""
        return self.right / self.scored

    def find_interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the share.

        Answers of one row may be right or wrong together, so this is Wilson's for the effective
        number of independent answers. If all or none are right, it takes them as independent.
        """
        m, n, h, p = self.rows, self.scored, self.right, self.share
        spread = p * (1 - p) / n
        if m > 1 and spread > 0:
            # In whole numbers, n² times as much: differences of large floats would be lost.
            apart = n**2 * self.right_squares - 2 * n * h * self.products
            apart += h**2 * self.scored_squares
            between = m * apart / ((m - 1) * n**4)
            n = n / max(1.0, between / spread)
        return wilson(p, n)

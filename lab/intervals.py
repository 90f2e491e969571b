"""Wilson's 95 % interval of a share, for trials that are independent or clustered in rows."""

import math

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

    Answers of one row may be right or wrong together, so this is Wilson's for the effective
    number of independent answers. If all or none are right, it takes them as independent.

    Args:
        right: right answers of each row.
        scored: answers of each row.
    """
    n, rows = int(scored.sum()), len(scored)
    share = int(right.sum()) / n
    apart = (right - share * scored).double()
    spread = share * (1 - share) / n
    if rows > 1 and spread > 0:
        between = rows / (rows - 1) * float(apart.square().sum()) / n**2
        n = n / max(1.0, between / spread)
    return wilson(share, n)

"""Holm's correction of p values for how many there are."""

from collections.abc import Sequence

import numpy as np


def holm(ps: Sequence[float]) -> list[float]:
    """Return p values after Holm's correction: of p₍₁₎ ≤ … ≤ p₍ₘ₎, max over j ≤ i of (m−j+1) p₍ⱼ₎.

    Source: Holm, Scand. J. Stat. 6 (1979), 65.
    """
    corrected, highest = [1.0] * len(ps), 0.0
    for rank, i in enumerate(np.argsort(ps, kind="stable")):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
        corrected[i] = highest
    return corrected

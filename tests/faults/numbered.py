"""Cases by number: each number makes the same case again.

A suite tries a few cases by default; `make faults` tries thousands. FAULTS is how many, FAULTS_FROM
the first number, so that FAULTS=1 FAULTS_FROM=812 repeats case 812.
"""

import os
import random
from collections.abc import Iterator


def draw_cases(default: int) -> Iterator[tuple[int, random.Random]]:
    """Yield the number of each case, and what its choices are drawn from."""
    first = int(os.environ.get("FAULTS_FROM", "0"))
    for number in range(first, first + int(os.environ.get("FAULTS", default))):
        yield number, random.Random(number)

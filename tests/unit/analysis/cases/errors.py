"""Errors by cause, and one by one."""

import math
from dataclasses import replace

from analysis.errors import Cause, Example, Examples, Ledger
from analysis.errors.causes import MASKED, OTHER_PAIR, Reader
from tests.unit.analysis.case import Case


def ledger(wrong: int, *causes: Cause) -> Ledger:
    ends = (math.nan, math.nan)
    return Ledger(90, wrong, (0.1, 0.3), causes, math.nan, ends, math.nan, 0, None, 2)


def cause(name: str, count: int, share: float) -> Cause:
    return Cause(name, count, share, (share - 0.1, share + 0.1), 0.05)


OTHERS = cause(OTHER_PAIR, 27, 0.9)
HIDDEN = cause(MASKED, 3, 0.1)
MANY = ledger(30, HIDDEN, OTHERS)
NEAR = replace(MANY, neighbours=0.8, neighbours_interval=(0.7, 0.9), by_chance=0.5)
CASES = [
    Case("planted", MANY, "another pair's value 90.0 % (random answers 5.0 %), masked"),
    Case("planted", NEAR, "80.0 % [70.0 %, 90.0 %], by chance 50.0 %"),
    Case("planted", replace(MANY, reader=Reader(1, 0, 3.0)), "head 1.0", "a mask hides"),
    Case("planted", replace(MANY, masked=4), "errors whose key or value a mask hides"),
    Case("null", ledger(0), "Wrong answers: 0 of 90 (0.0 %), too few", "median rank"),
    Case("boundary", ledger(1, cause(MASKED, 1, 1.0)), "1 of 90 (1.1 %), too few", "frequent"),
    Case("boundary", ledger(19, OTHERS), "too few to say", "frequent"),
    Case("boundary", ledger(20, OTHERS), "the most frequent causes", "too few"),
    Case(
        "planted",
        Examples((Example(0, 4, 7, 2, 3, MASKED, 2, 0.1),)),
        "after token 7 at position 4 of row 0 it answers 3 instead of 2 (masked away).",
    ),
]

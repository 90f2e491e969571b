"""Planted faults and right modules that measure how reliable `certify` is.

A fault of `FAULTS` is found if its law fails. A false alarm is a law that fails on a module of
`RIGHT`, or on a fault without being its law or one of its `also`.

Right mixers are written in small methods, so that a fault is a row: what is patched, and which law
must fail.
"""

from tests.planted.decoding import DECODING
from tests.planted.entry import Fault as Fault
from tests.planted.entry import Right as Right
from tests.planted.leaks import LEAKS
from tests.planted.numbers import NUMBERS
from tests.planted.rare import RARE
from tests.planted.right import RIGHT as RIGHT
from tests.planted.rows import ROWS

FAULTS: tuple[Fault, ...] = (*ROWS, *LEAKS, *DECODING, *NUMBERS, *RARE)
"""All faults; those that only rare inputs show come last."""

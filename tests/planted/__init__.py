"""Planted faults and right modules that measure how reliable `certify` is.

A fault of `FAULTS` is found if its law fails. A false alarm is a law that fails on a module of
`RIGHT`, or on a fault without being its law or one of its `also`.

Right mixers are written in small methods, so that a fault is a subclass that replaces one of them.
"""

from tests.planted.batches import BATCHES
from tests.planted.decoders import DECODERS
from tests.planted.derivatives import DERIVATIVES
from tests.planted.entry import Fault as Fault
from tests.planted.entry import Right as Right
from tests.planted.forms import FORMS
from tests.planted.leaks import LEAKS
from tests.planted.leaks_of_scans import LEAKS_OF_SCANS
from tests.planted.numerics import NUMERICS
from tests.planted.packed import PACKED
from tests.planted.padded import PADDED
from tests.planted.parameters import PARAMETERS
from tests.planted.rare import RARE
from tests.planted.repeats import REPEATS
from tests.planted.right import RIGHT as RIGHT
from tests.planted.stepped import STEPPED

FAULTS: tuple[Fault, ...] = (
    *REPEATS,
    *LEAKS,
    *LEAKS_OF_SCANS,
    *BATCHES,
    *DECODERS,
    *STEPPED,
    *PADDED,
    *PARAMETERS,
    *DERIVATIVES,
    *FORMS,
    *NUMERICS,
    *PACKED,
    *RARE,
)
"""All faults; those that only rare inputs show come last."""

"""Planted faults and right modules that measure how reliable `certify` is.

A fault of `FAULTS` is found if its law fails. A false alarm is a law that fails on a module of
`RIGHT`, or on a fault without being its law or one of its `also`.

Right mixers are written in small methods, so that a fault is a subclass that replaces one of them.
"""

from lab.bench.calibration.batches import BATCHES
from lab.bench.calibration.decoders import DECODERS
from lab.bench.calibration.derivatives import DERIVATIVES
from lab.bench.calibration.entry import Fault as Fault
from lab.bench.calibration.entry import Right as Right
from lab.bench.calibration.forms import FORMS
from lab.bench.calibration.leaks import LEAKS
from lab.bench.calibration.leaks_of_scans import LEAKS_OF_SCANS
from lab.bench.calibration.numerics import NUMERICS
from lab.bench.calibration.packed import PACKED
from lab.bench.calibration.padded import PADDED
from lab.bench.calibration.parameters import PARAMETERS
from lab.bench.calibration.rare import RARE
from lab.bench.calibration.repeats import REPEATS
from lab.bench.calibration.right import RIGHT as RIGHT
from lab.bench.calibration.stepped import STEPPED

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

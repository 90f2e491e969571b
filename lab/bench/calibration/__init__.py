"""Planted faults and right modules, on which `certify` itself is measured.

Detection is the share of `FAULTS` whose law fails; a false alarm, a law that fails on one of
`RIGHT`, or on a fault and is neither its law nor one of its `also`.
"""

from lab.bench.calibration.batches import BATCHES
from lab.bench.calibration.decoders import DECODERS
from lab.bench.calibration.entry import Fault as Fault
from lab.bench.calibration.entry import Right as Right
from lab.bench.calibration.forms import FORMS
from lab.bench.calibration.leaks import LEAKS
from lab.bench.calibration.leaks_of_scans import LEAKS_OF_SCANS
from lab.bench.calibration.numerics import NUMERICS
from lab.bench.calibration.padded import PADDED
from lab.bench.calibration.parameters import PARAMETERS
from lab.bench.calibration.repeats import REPEATS
from lab.bench.calibration.right import RIGHT as RIGHT

FAULTS: tuple[Fault, ...] = (
    *REPEATS,
    *LEAKS,
    *LEAKS_OF_SCANS,
    *BATCHES,
    *DECODERS,
    *PADDED,
    *PARAMETERS,
    *FORMS,
    *NUMERICS,
)
"""Every fault, by the law that it breaks."""

"""Planted faults and right modules, on which `certify` itself is measured.

Detection is the share of `FAULTS` whose law fails; a false alarm, a law that fails on one of
`RIGHT`, or on a fault and is neither its law nor one of its `also`.
"""

from lab.laws.calibration.batches import BATCHES
from lab.laws.calibration.decoders import DECODERS
from lab.laws.calibration.entry import Fault as Fault
from lab.laws.calibration.entry import Right as Right
from lab.laws.calibration.forms import FORMS
from lab.laws.calibration.leaks import LEAKS
from lab.laws.calibration.leaks_of_scans import LEAKS_OF_SCANS
from lab.laws.calibration.numerics import NUMERICS
from lab.laws.calibration.padded import PADDED
from lab.laws.calibration.parameters import PARAMETERS
from lab.laws.calibration.repeats import REPEATS
from lab.laws.calibration.right import RIGHT as RIGHT

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

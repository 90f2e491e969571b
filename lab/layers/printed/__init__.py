"""Layers that compute the paper's formulas as printed, where these differ from what works.

None is ever a default. Each is a mixer from [b t d] to [b t d] that shows one erratum and is
otherwise correct. Train it with `lab mqar --model lab.layers.printed:NAME`; its letter is U.
Literal readings that are an option of another layer are not repeated here: see `lab.errata`.
"""

from torch import nn

from lab.layers.printed.attention import MaskAfterSoftmaxAttention, SoftSumAttention
from lab.layers.printed.cdmoe import FloorSquareCDMoE
from lab.layers.printed.rotation import (
    DynamicBaseAttention,
    HeadRotatedAttention,
    RoundedRotationAttention,
    SkewedRotationAttention,
)
from lab.layers.printed.ssd import TargetSummedSSD

__all__ = [
    "PRINTED",
    "DynamicBaseAttention",
    "FloorSquareCDMoE",
    "HeadRotatedAttention",
    "MaskAfterSoftmaxAttention",
    "RoundedRotationAttention",
    "SkewedRotationAttention",
    "SoftSumAttention",
    "TargetSummedSSD",
]

PRINTED: dict[str, type[nn.Module]] = {
    "R1": SkewedRotationAttention,
    "R5": HeadRotatedAttention,
    "R6": DynamicBaseAttention,
    "R7": RoundedRotationAttention,
    "S2": TargetSummedSSD,
    "D2": MaskAfterSoftmaxAttention,
    "I3": SoftSumAttention,
    "C4": FloorSquareCDMoE,
}
"""Erratum → the layer that shows it."""

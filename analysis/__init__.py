"""What a trained model learned.

One concept a file: `measure(subject) → results`, `describe(result) → Words`, `draw(result) →
Figure`. The report shows every entry of `ANALYSES`, in this order, where it applies.
"""

from analysis import anatomy, baselines, curves, matrices
from analysis.base import Analysis

ANALYSES: tuple[Analysis, ...] = (baselines, curves, anatomy, matrices)

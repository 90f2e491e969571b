"""Old path."""
# ruff: noqa: F401

from analysis.base import thin
from analysis.scoring import estimate_accuracy, sum_by_row
from analysis.statistics.comparisons import SURE, westfall_young
from lab.intervals import Estimate, divide_sums, estimate_ratio

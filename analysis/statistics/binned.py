"""Old path."""
# ruff: noqa: F401

from analysis.statistics.comparisons import (
    Bins,
    bin_accuracy,
    describe_contrast,
    describe_extremes,
    format_span,
)

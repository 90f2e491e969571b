"""Old path."""
# ruff: noqa: F401

from analysis.statistics.comparisons import (
    compute_least_p,
    estimate_curve,
    estimate_median,
    log_rank_p,
    permutation_p,
)


class MissingLibraryError(ValueError):
    """x"""


def check_installed():
    """x"""

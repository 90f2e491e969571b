"""Old path."""
# ruff: noqa: F401

from analysis.statistics.comparisons import holm

"""Old path."""
# ruff: noqa: F401

from lab.intervals import bootstrap, bootstrap_ratio, bound_share, resample_sums

"""Old path."""
# ruff: noqa: F401

from lab.intervals import bound_by_student, bound_mean

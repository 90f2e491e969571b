"""Benchmarks: every speed claim of the lab as a ratio, both sides measured in one run.

A benchmark is a module of this package with a function `measure`, which yields a `Ratio` for each
pair of ways to do the same work.
"""

BENCHMARKS = ("rows", "step", "experts", "attention", "ssd", "delta", "scaling", "commands", "gpu")
"""The benchmarks' names, which are their modules' names, in the order in which they run."""
ON_GPU = ("gpu",)
"""Those that need a GPU."""

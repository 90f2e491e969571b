"""Benchmarks: every speed claim of the lab as a ratio, both sides measured in one run.

A benchmark is a module of this package with a function `measure`, which returns a list of `Ratio`.
"""

ON_GPU = ("graphs", "roofline", "kernels")
"""Those that need a GPU."""
BENCHMARKS = (
    "generator",
    "rows",
    "step",
    "reading",
    "experts",
    "attention",
    "ssd",
    "scaling",
    "analyze",
    "certify",
    "startup",
    *ON_GPU,
)
"""The benchmarks' names, which are their modules' names, in the order in which they run."""

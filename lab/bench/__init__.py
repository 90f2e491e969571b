"""Benchmarks: every speed claim of the lab as a ratio, both sides measured in one run."""

BENCHMARKS = {
    "generator": "lab.bench.generator:generator",
    "rows": "lab.bench.rows:rows",
    "step": "lab.bench.step:step",
    "experts": "lab.bench.experts:experts",
    "attention": "lab.bench.attention:attention",
    "ssd": "lab.bench.ssd:ssd",
    "analyze": "lab.bench.analyze:analyze",
    "certify": "lab.bench.certify:certify",
    "startup": "lab.bench.startup:startup",
}
"""Where each benchmark is; called without arguments, it returns a list of `Ratio`."""

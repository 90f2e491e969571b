# pip install flash-linear-attention==0.6.0
"""Repeatable: chunk_ttt_linear_ref scales its caller's queries in place (ops/ttt/naive.py:41)
where they are fp32 and need no padding."""

import sys
from importlib import import_module

import torch

reference = import_module("fla.ops.ttt.naive").chunk_ttt_linear_ref
worst = 0.0
for seed in (0, 1):
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, 1, 32, 2, 8)
    w, b, eta = torch.randn(2, 8), torch.randn(2, 8), 0.1 * torch.rand(1, 32, 2, 1)
    before = q.clone()
    first = reference(q, k, v, w, b, eta)[0]
    second = reference(q, k, v, w, b, eta)[0]
    print(f"seed {seed}: the queries are {(q / before).mean():.3f} of what they were")
    worst = max(worst, ((second - first).abs().max() / first.abs().max()).item())
print(f"a second call differs from the first by {worst:.1e}")
sys.exit(worst > 1e-3)

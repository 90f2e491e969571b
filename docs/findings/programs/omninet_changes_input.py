# pip install omninet-pytorch==0.0.6
"""Repeatable: OmninetCausal adds its position embeddings to its caller's tensor, in place
(omninet_pytorch.py:218)."""

import sys
from importlib import import_module

import torch

omninet = import_module("omninet_pytorch").OmninetCausal
worst = 0.0
for seed in (0, 1):
    torch.manual_seed(seed)
    module, x = omninet(dim=16, depth=2, dim_head=8, heads=2).eval(), torch.randn(1, 8, 16)
    before = x.clone()
    with torch.no_grad():
        first, second = module(x).clone(), module(x)
    print(f"seed {seed}: the input has moved by {(x - before).abs().max():.1e}")
    worst = max(worst, ((second - first).abs().max() / first.abs().max()).item())
print(f"a second call differs from the first by {worst:.1e}")
sys.exit(worst > 1e-3)

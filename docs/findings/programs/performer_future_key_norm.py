# pip install performer-pytorch==1.1.4
"""Causal: a later key's size reaches earlier outputs, through a maximum over all positions
(performer_pytorch.py:113) that the constant added after it is not scaled by."""

import sys
from importlib import import_module

import torch

attention = import_module("performer_pytorch").SelfAttention
worst = 0.0
for size in (1, 20, 60):
    for seed in (0, 1):
        torch.manual_seed(seed)
        module = attention(dim=16, heads=2, dim_head=8, causal=True, nb_features=32)
        module, x = module.double().eval(), torch.randn(1, 12, 16, dtype=torch.float64)
        later = x.clone()
        later[:, 8] = size * torch.randn(16, dtype=torch.float64)
        with torch.no_grad():
            y, moved = module(x)[:, :8], module(later)[:, :8]
        error = ((y - moved).abs().max() / y.abs().max()).item()
        print(f"a later token of size {size}, seed {seed}: {error:.1e}")
        worst = max(worst, error)
print(f"a later token moves earlier outputs by {worst:.1e}")
sys.exit(worst > 1e-9)

# pip install x-transformers==2.31.10
"""Causal: Decoder(mv_split_residual=True) takes the residual's mean over all positions
(x_transformers.py:1281), later ones too."""

import sys
from importlib import import_module

import torch

decoder = import_module("x_transformers").Decoder
worst = 0.0
for seed in (0, 1):
    torch.manual_seed(seed)
    module = decoder(dim=16, depth=2, heads=2, attn_dim_head=8, mv_split_residual=True)
    module, x = module.double().eval(), torch.randn(1, 8, 16, dtype=torch.float64)
    later = x.clone()
    later[:, 5] = torch.randn(16, dtype=torch.float64)
    with torch.no_grad():
        y, moved = module(x), module(later)
    worst = max(worst, ((y - moved)[:, :5].abs().max() / y.abs().max()).item())
print(f"a later token moves earlier outputs by {worst:.1e}")
sys.exit(worst > 1e-9)

# pip install x-transformers==2.31.10
"""Causal: orthog_project takes all positions and features of a row for one vector
(x_transformers.py:241), so that three options of Decoder let later tokens through."""

import sys
from importlib import import_module

import torch

decoder = import_module("x_transformers").Decoder
worst = 0.0
per_head = "attn_orthog_projected_values_per_head"
for option in ("attn_orthog_projected_values", per_head, "orthog_residual"):
    for seed in (0, 1):
        torch.manual_seed(seed)
        module = decoder(dim=16, depth=2, heads=2, attn_dim_head=8, **{option: True})
        module, x = module.double().eval(), torch.randn(1, 8, 16, dtype=torch.float64)
        later = x.clone()
        later[:, 5] = torch.randn(16, dtype=torch.float64)
        with torch.no_grad():
            y, moved = module(x), module(later)
        error = ((y - moved)[:, :5].abs().max() / y.abs().max()).item()
        print(f"{option}, seed {seed}: {error:.1e}")
        worst = max(worst, error)
print(f"a later token moves earlier outputs by {worst:.1e}")
sys.exit(worst > 1e-9)

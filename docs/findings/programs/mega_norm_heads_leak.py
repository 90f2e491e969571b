# pip install Mega-pytorch==0.1.0
"""Causal: MegaLayer(norm_mhesa_heads=True) normalises heads by their mean over all positions
(mega_pytorch.py:216), later ones too."""

import sys
from importlib import import_module

import torch

mega = import_module("mega_pytorch").MegaLayer
worst = 0.0
for seed in (0, 1):
    torch.manual_seed(seed)
    module = mega(
        dim=16, ema_heads=4, attn_dim_qk=8, attn_dim_value=16, causal=True, norm_mhesa_heads=True
    ).double()
    x = torch.randn(1, 12, 16, dtype=torch.float64)
    later = x.clone()
    later[:, 8] = torch.randn(16, dtype=torch.float64)
    with torch.no_grad():
        y, moved = module(x), module(later)
    worst = max(worst, ((y - moved)[:, :8].abs().max() / y.abs().max()).item())
print(f"a later token moves earlier outputs by {worst:.1e}")
sys.exit(worst > 1e-9)

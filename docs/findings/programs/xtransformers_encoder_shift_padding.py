# pip install x-transformers==2.31.10
"""Padding: Encoder(shift_tokens=1) shifts by -1 too, and calls the feedforward's shift without the
mask (x_transformers.py:3704), so that padding moves real outputs."""

import sys
from importlib import import_module

import torch

encoder = import_module("x_transformers").Encoder
worst = 0.0
for seed in (0, 1):
    torch.manual_seed(seed)
    module = encoder(dim=30, depth=2, heads=2, attn_dim_head=8, shift_tokens=1).double().eval()
    x = torch.randn(1, 8, 30, dtype=torch.float64)
    mask = torch.arange(8)[None] < 6
    padded = x.clone()
    padded[:, 6:] = torch.randn(1, 2, 30, dtype=torch.float64)
    with torch.no_grad():
        y, moved = module(x, mask=mask), module(padded, mask=mask)
    worst = max(worst, ((y - moved)[:, :6].abs().max() / y.abs().max()).item())
print(f"what stands in the padding moves real outputs by {worst:.1e}")
sys.exit(worst > 1e-9)

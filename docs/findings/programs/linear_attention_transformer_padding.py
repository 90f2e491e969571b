# pip install linear-attention-transformer==0.19.1
"""Padding: the shift of LinearAttentionTransformer(shift_tokens=True) looks for mask, and is not
given input_mask (linear_attention_transformer.py:121)."""

import sys
from importlib import import_module

import torch

transformer = import_module("linear_attention_transformer").LinearAttentionTransformer
worst = 0.0
for seed in (0, 1):
    torch.manual_seed(seed)
    module = transformer(30, 1, 8, heads=2, dim_head=8, shift_tokens=True).double().eval()
    x = torch.randn(1, 8, 30, dtype=torch.float64)
    mask = torch.arange(8)[None] < 6
    padded = x.clone()
    padded[:, 6:] = torch.randn(1, 2, 30, dtype=torch.float64)
    with torch.no_grad():
        y, moved = module(x, input_mask=mask), module(padded, input_mask=mask)
    worst = max(worst, ((y - moved)[:, :6].abs().max() / y.abs().max()).item())
print(f"what stands in the padding moves real outputs by {worst:.1e}")
sys.exit(worst > 1e-9)

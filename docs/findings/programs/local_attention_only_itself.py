# pip install local-attention==1.11.2
"""Gradient: with look_backward=0 a causal LocalMHA sees itself alone, as its exact window, on by
default, is window_size * look_backward = 0 wide (local_attention.py:193)."""

import sys
from importlib import import_module

import torch

attention = import_module("local_attention").LocalMHA
seen = largest = 0.0
for seed in (0, 1):
    torch.manual_seed(seed)
    module = attention(
        dim=16, heads=2, dim_head=8, window_size=4, causal=True, look_backward=0
    ).double()
    x = torch.randn(1, 8, 16, dtype=torch.float64)
    y = module(x)
    values = module.to_out(module.to_qkv(x).chunk(3, -1)[2])
    seen = max(seen, (y - values).abs().max().item())
    y.square().sum().backward()
    largest = max(largest, module.to_qkv.weight.grad[:32].abs().max().item())
print(f"outputs and projected values differ by {seen:.1e}; gradient of queries, keys {largest:.1e}")
sys.exit(max(seen, largest) < 1e-12)

# pip install h-transformer-1d==0.1.9
"""Cut: CausalHAttention1D attends to nothing in sequences up to block_size, 128 by default, as
the number of levels is -1 there and its mask without rows (h_transformer_1d.py:349, :441)."""

import sys
from importlib import import_module

import torch

attention = import_module("h_transformer_1d.h_transformer_1d").CausalHAttention1D
worst = 0.0
for seed in (0, 1):
    torch.manual_seed(seed)
    module = attention(16, max_seq_len=64, heads=2, dim_head=8, block_size=8).double()
    x = torch.randn(1, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        whole, cut = module(x)[:, :8], module(x[:, :8])
        bias = module.to_out.bias
    print(f"seed {seed}: 8 tokens alone, output less its bias {(cut - bias).abs().max():.1e}")
    worst = max(worst, ((whole - cut).abs().max() / whole.abs().max()).item())
print(f"8 tokens alone, and as the first of 16, differ by {worst:.1e}")
sys.exit(worst > 1e-9)

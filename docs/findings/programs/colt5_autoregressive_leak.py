# pip install CoLT5-attention==0.11.2
"""Causal: all tokens of a window decide which of its queries are routed
(transformer_block.py:965), so that outputs change with later tokens."""

import sys
from importlib import import_module

import torch

attention = import_module("colt5_attention").ConditionalRoutedAutoregressiveAttention
heads = {"light_heads": 2, "light_dim_head": 8, "heavy_heads": 2, "heavy_dim_head": 8}
windows = {"light_window_size": 8, "heavy_window_size": 8}
worst = 0.0
for seed in (0, 1, 2):
    torch.manual_seed(seed)
    module = attention(16, num_heavy_tokens_q=4, num_heavy_tokens_kv=4, **heads, **windows)
    module, x = module.double().eval(), torch.randn(1, 32, 16, dtype=torch.float64)
    with torch.no_grad():
        y = module(x)
        for t in range(16, 32):
            later = x.clone()
            later[:, t] = 3 * torch.randn(16, dtype=torch.float64)
            moved = (module(later) - y)[:, :t].abs().max() / y.abs().max()
            worst = max(worst, moved.item())
print(f"a later token moves earlier outputs by {worst:.1e}")
sys.exit(worst > 1e-9)

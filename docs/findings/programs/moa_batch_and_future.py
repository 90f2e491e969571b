# pip install mixture-of-attention==0.0.25
"""Rows of a batch, causal: the router is that of colt5_router_mixes_rows, and all tokens of a
window decide which of its queries are routed (mixture_of_attention.py:536)."""

import sys
from importlib import import_module

import torch

attention = import_module("mixture_of_attention").MixtureOfAutoregressiveAttention
sizes = {"local_attn_window_size": 8, "heads": 2, "dim_head": 8, "flash_attn": False}
rows = future = 0.0
for seed in (0, 1, 2):
    torch.manual_seed(seed)
    module = attention(16, num_routed_queries=4, num_routed_key_values=4, **sizes)
    module, x = module.double().eval(), torch.randn(3, 32, 16, dtype=torch.float64)
    with torch.no_grad():
        y, alone = module(x), module(x[:1])
        rows = max(rows, ((module(x[1:2]) - y[1:2]).abs().max() / y.abs().max()).item())
        for t in range(24, 32):
            later = x[:1].clone()
            later[:, t] = 3 * torch.randn(16, dtype=torch.float64)
            moved = (module(later) - alone)[:, :t].abs().max() / alone.abs().max()
            future = max(future, moved.item())
print(f"a row in its batch and alone differ by {rows:.1e}, a later token moves it by {future:.1e}")
sys.exit(max(rows, future) > 1e-9)

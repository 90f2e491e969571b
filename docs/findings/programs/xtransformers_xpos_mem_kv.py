# pip install x-transformers==2.31.10
"""Cut: xPos is centred at half the length (x_transformers.py:886), which cancels between queries
and keys, but not for the memory keys of Decoder(rotary_xpos=True, attn_num_mem_kv=2)."""

import sys
from importlib import import_module

import torch

decoder = import_module("x_transformers").Decoder
errors = {0: 0.0, 2: 0.0}
for memories in errors:
    for seed in (0, 1):
        torch.manual_seed(seed)
        module = decoder(
            dim=32,
            depth=1,
            heads=2,
            attn_dim_head=16,
            rotary_xpos=True,
            rotary_xpos_scale_base=16,
            attn_num_mem_kv=memories,
        ).eval()
        x = torch.randn(1, 64, 32)
        with torch.no_grad():
            y, cut = module(x)[:, :8], module(x[:, :8])
        errors[memories] = max(errors[memories], ((y - cut).abs().max() / y.abs().max()).item())
print(f"without memory keys {errors[0]:.1e}")
print(f"8 tokens alone, and as the first of 64, differ by {errors[2]:.1e}")
sys.exit(errors[2] > 1e-4)

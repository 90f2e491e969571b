# pip install local-attention==1.11.2
"""Padding: without a mask LocalAttention(autopad=True, causal=False) attends to the zeros that it
pads with (local_attention.py:126), for the mask of what it padded knows only the borders (:171)."""

import sys
from importlib import import_module

import torch

local_attention = import_module("local_attention").LocalAttention
worst = 0.0
for seed in (0, 1):
    torch.manual_seed(seed)
    attention = local_attention(
        window_size=8, causal=False, autopad=True, look_backward=1, look_forward=1
    )
    q, k, v = torch.randn(3, 1, 5, 16, dtype=torch.float64)  # five tokens, within one window
    softmax = (q @ k.mT * 16**-0.5).softmax(-1) @ v
    given = attention(q, k, v, mask=torch.ones(1, 5, dtype=torch.bool))
    print(f"seed {seed}: with a mask of ones {(given - softmax).abs().max():.1e}")
    worst = max(worst, ((attention(q, k, v) - softmax).abs().max() / softmax.abs().max()).item())
print(f"attention to five tokens differs from softmax attention by {worst:.1e}")
sys.exit(worst > 1e-9)

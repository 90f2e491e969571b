# pip install local-attention==1.11.2
"""Decoding: at each window's last position LocalMHA(exact_windowsize=False) keeps a window too
few, as the length modulo the window is 0 there, not a window (transformer.py:145)."""

import sys
from importlib import import_module

import torch

attention = import_module("local_attention").LocalMHA
sizes = {"dim": 32, "heads": 2, "dim_head": 16, "window_size": 4, "causal": True}
worst = 0.0
for seed in (0, 1):
    torch.manual_seed(seed)
    module = attention(exact_windowsize=False, use_rotary_pos_emb=False, **sizes).double().eval()
    x = torch.randn(1, 16, 32, dtype=torch.float64)
    with torch.no_grad():
        whole = module(x)
        _, cache = module(x[:, :1], return_cache=True)
        for t in range(1, 16):
            step, cache = module(x[:, t : t + 1], cache=cache, return_cache=True)
            error = ((step[:, 0] - whole[:, t]).abs().max() / whole.abs().max()).item()
            print(f"seed {seed}, token {t}: {error:.1e}")
            worst = max(worst, error)
print(f"a cached step and the whole differ by {worst:.1e}")
sys.exit(worst > 1e-9)

# pip install local-attention==1.11.2
"""Decoding: LocalMHA(qk_rmsnorm=True) scales scores by qk_scale = 8 on the whole, and by
dim_head ** -0.5 in a cached step (transformer.py:134)."""

import sys
from importlib import import_module

import torch

attention = import_module("local_attention").LocalMHA
sizes = {"dim": 32, "heads": 2, "dim_head": 16, "window_size": 8, "causal": True}
worst = 0.0
for seed in (0, 1):
    torch.manual_seed(seed)
    module = attention(qk_rmsnorm=True, use_rotary_pos_emb=False, **sizes).double().eval()
    x = torch.randn(1, 6, 32, dtype=torch.float64)
    with torch.no_grad():
        whole = module(x)
        _, cache = module(x[:, :5], return_cache=True)
        step = module(x[:, 5:], cache=cache)
    worst = max(worst, ((step[:, 0] - whole[:, 5]).abs().max() / whole.abs().max()).item())
print(f"a cached step and the whole differ by {worst:.1e}")
sys.exit(worst > 1e-9)

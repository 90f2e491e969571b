# pip install flash-linear-attention==0.6.0
"""Decoding and padding: ABCAttention's kernels sum exp(s) from the first token of a call
(ops/abc/chunk.py:1007), and its state does not hold that sum; a mask leaves padding in the sum."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton.language as tl
from fla.layers import ABCAttention
from fla.models.utils import Cache
from fla.ops.abc import chunk as kernels
from triton.runtime.autotuner import Autotuner

Autotuner._bench = lambda self, *args, **kwargs: [0.0]
# A compiled kernel can cast its loop's index.
kernels.__dict__["range"] = lambda *ends: [tl.full((), i, tl.int32) for i in range(*map(int, ends))]
torch.manual_seed(0)
layer = ABCAttention(32, num_heads=2, num_slots=8, use_rope=False, layer_idx=0).eval()
x, cache = torch.randn(1, 20, 32), Cache()
with torch.no_grad():
    whole = layer(x)[0]
    parts = [layer(p, past_key_values=cache, use_cache=True)[0] for p in (x[:, :10], x[:, 10:])]
    padded = layer(x, attention_mask=(torch.arange(20) >= 5)[None].long())[0][:, 5:]
    alone = layer(x[:, 5:])[0]
pairs = {"two calls": (torch.cat(parts, 1), whole), "outputs behind 5 of padding": (padded, alone)}
errors = {name: ((a - b).abs().max() / b.abs().max()).item() for name, (a, b) in pairs.items()}
print("; ".join(f"{name} differ by {error:.1e}" for name, error in errors.items()))
sys.exit(max(errors.values()) > 1e-3)

# pip install flash-linear-attention==0.6.0
"""Padding: with a cache, WallAttention does not read attention_mask (layers/wall_attn.py:165);
models in evaluation mode have a cache by default."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
import torch
from fla.layers import WallAttention
from fla.models.utils import Cache
from triton.runtime.autotuner import Autotuner

Autotuner._bench = lambda self, *args, **kwargs: [0.0]
torch.manual_seed(0)
layer = WallAttention(32, num_heads=2, layer_idx=0).eval()
x, mask = torch.randn(1, 12, 32), (torch.arange(12) >= 5)[None].long()
with torch.no_grad():
    alone = layer(x[:, 5:])[0]
    padded = {
        "without a cache": layer(x, mask)[0],
        "with one": layer(x, mask, past_key_values=Cache(), use_cache=True)[0],
    }
errors = {k: ((y[:, 5:] - alone).abs().max() / alone.abs().max()).item() for k, y in padded.items()}
print("5 of padding move outputs by", ", ".join(f"{e:.1e} {k}" for k, e in errors.items()))
sys.exit(max(errors.values()) > 1e-3)

# pip install flash-linear-attention==0.6.0
"""Windows: ForgettingAttention does not give parallel_forgetting_attn its window_size
(layers/forgetting_attn.py:135 and :138), but keeps only a window in its cache."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
import torch
from fla.layers import ForgettingAttention
from fla.models.utils import Cache
from triton.runtime.autotuner import Autotuner

Autotuner._bench = lambda self, *args, **kwargs: [0.0]
torch.manual_seed(0)
layer = ForgettingAttention(32, num_heads=2, window_size=4, layer_idx=0).eval()
x, mask, cache = torch.randn(1, 12, 32), torch.ones(1, 12, dtype=torch.long), Cache()
with torch.no_grad():
    y = layer(x)[0]
    changed = layer(torch.cat([-x[:, :1], x[:, 1:]], 1))[0]
    layer(x[:, :11], mask[:, :11], past_key_values=cache, use_cache=True)
    step = layer(x[:, 11:], mask, past_key_values=cache, use_cache=True)[0]
beyond = ((changed - y)[:, 4:].abs().max() / y.abs().max()).item()
decoding = ((step - y[:, 11:]).abs().max() / y.abs().max()).item()
print(f"token 0 moves outputs from 4 on, beyond a window of 4, by {beyond:.1e}")
print(f"a step differs from forward by {decoding:.1e}")
sys.exit(beyond > 1e-3 or decoding > 1e-3)

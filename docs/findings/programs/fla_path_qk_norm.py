# pip install flash-linear-attention==0.6.0
"""Padding: PaTHAttention(use_qk_norm=True) normalizes queries and keys without a mask only
(layers/path_attn.py:123), so a mask that keeps all tokens, or a cache, gives other outputs."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
import torch
from fla.layers import PaTHAttention
from fla.models.utils import Cache
from triton.runtime.autotuner import Autotuner

Autotuner._bench = lambda self, *args, **kwargs: [0.0]
torch.manual_seed(0)
x, errors = torch.randn(1, 12, 32), []
for use_qk_norm in (False, True):
    layer = PaTHAttention(32, num_heads=2, use_qk_norm=use_qk_norm, layer_idx=0).eval()
    with torch.no_grad():
        y, masked = (
            layer(x)[0],
            layer(x, torch.ones(1, 12, dtype=torch.long), past_key_values=Cache())[0],
        )
    errors.append(((masked - y).abs().max() / y.abs().max()).item())
print(
    f"a mask of ones moves outputs by {errors[0]:.1e} without and {errors[1]:.1e} with use_qk_norm"
)
sys.exit(errors[1] > 1e-3)

# pip install flash-linear-attention==0.6.0
"""Options: ReBasedLinearAttention(causal=False) is causal: only forward_reference reads the option
(layers/rebased.py:66)."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
import torch
from fla.layers import ReBasedLinearAttention
from triton.runtime.autotuner import Autotuner

Autotuner._bench = lambda self, *args, **kwargs: [0.0]
torch.manual_seed(0)
layer = ReBasedLinearAttention(32, num_heads=2, num_key_value_heads=2, causal=False).eval()
x = torch.randn(1, 12, 32)
with torch.no_grad():
    y, wanted = layer(x), layer.forward_reference(x)
    changed = layer(torch.cat([x[:, :-1], -x[:, -1:]], 1))
reach = ((changed - y)[:, :-1].abs().max() / y.abs().max()).item()
error = ((y - wanted).abs().max() / wanted.abs().max()).item()
print(f"causal=False: the last token moves earlier outputs by {reach:.1e}")
print(f"forward differs from forward_reference by {error:.1e}")
sys.exit(error > 1e-3)

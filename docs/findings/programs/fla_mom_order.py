# pip install flash-linear-attention==0.6.0
"""Causality: MomAttention gathers each memory's tokens with an argsort that is not stable
(layers/mom.py:183), so that a memory may read its tokens in another order."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
import torch
from fla.layers import MomAttention
from triton.runtime.autotuner import Autotuner

Autotuner._bench = lambda self, *args, **kwargs: [0.0]
torch.manual_seed(0)
layer = MomAttention(32, head_dim=16, num_heads=1, num_memories=3, layer_idx=0).eval()
x = torch.randn(1, 40, 32)
with torch.no_grad():
    y = layer(x)[0]
    changed = layer(torch.cat([x[:, :-1], -x[:, -1:]], 1))[0]
early = ((changed - y)[:, :-1].abs().max() / y.abs().max()).item()
print(f"the last token moves earlier outputs by {early:.1e}")
sys.exit(early > 1e-3)

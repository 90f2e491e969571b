# pip install flash-linear-attention==0.6.0
"""Decoding: without mamba_ssm and with n_groups of 2 or more, Mamba2's prefill gives heads other
groups than its step does (layers/mamba2.py:606)."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
import torch
from fla.layers import Mamba2
from fla.models.utils import Cache
from triton.runtime.autotuner import Autotuner

Autotuner._bench = lambda self, *args, **kwargs: [0.0]
x, errors = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(0)), {}
for groups in (1, 2):
    torch.manual_seed(0)
    layer = Mamba2(4, head_dim=16, hidden_size=32, state_size=8, n_groups=groups, layer_idx=0)
    cache = Cache()
    with torch.no_grad():
        whole = layer.eval()(x)[0]
        layer(x[:, :11], past_key_values=cache, use_cache=True)
        step = layer(x[:, 11:], past_key_values=cache, use_cache=True)[0]
    errors[groups] = ((step - whole[:, 11:]).abs().max() / whole.abs().max()).item()
print("; ".join(f"n_groups={g}: a step differs from forward by {e:.1e}" for g, e in errors.items()))
sys.exit(max(errors.values()) > 1e-3)

# pip install flash-linear-attention==0.6.0
"""Padding: LogLinearMamba2 sets padding to zero, but counts it: a token's level depends on its
distance from the first token of the batch (layers/log_linear_mamba2.py:266)."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
import torch
from fla.layers import LogLinearMamba2
from fla.ops.log_linear_attn import chunk as kernels
from triton.runtime.autotuner import Autotuner

Autotuner._bench = lambda self, *args, **kwargs: [0.0]
# A compiled kernel can cast its loop's index.
cast = {"to": lambda i, dtype: i, "__mul__": lambda i, n: Index(int(i) * n)}
Index = type("Index", (int,), cast)
kernels.__dict__["range"] = lambda *ends: [Index(i) for i in range(*map(int, ends))]
torch.manual_seed(0)
layer = LogLinearMamba2(2, head_dim=32, hidden_size=32, state_size=64, layer_idx=0).eval()
x, errors = torch.randn(1, 12, 32), {}
with torch.no_grad():  # forward refuses a CPU and calls this
    alone = layer.cuda_kernels_forward(x)[0]
    for pad in (64, 3):
        mask = torch.tensor([[0] * pad + [1] * 12])
        both = torch.cat([torch.randn(1, pad, 32), x], 1)
        padded = layer.cuda_kernels_forward(both, attention_mask=mask)[0]
        errors[pad] = ((padded[:, pad:] - alone).abs().max() / alone.abs().max()).item()
print("; ".join(f"{pad} of padding move outputs by {e:.1e}" for pad, e in errors.items()))
sys.exit(max(errors.values()) > 1e-3)

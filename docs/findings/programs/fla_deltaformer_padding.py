# pip install flash-linear-attention==0.6.0
"""Padding: deltaformer_attn gives its mask to the second stage only, not to the first
(ops/deltaformer/parallel.py:740), whose values then contain padding."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
import torch
from fla.ops.deltaformer import parallel
from torch.nn.functional import scaled_dot_product_attention
from triton.runtime.autotuner import Autotuner

Autotuner._bench = lambda self, *args, **kwargs: [0.0]
# Kernels cast their loop's index. PyTorch's attention stands in for flash-attn's, of one row.
Index = type("Index", (int,), {"to": lambda self, dtype: self})
parallel.__dict__["range"] = lambda *ends: [Index(i) for i in range(*map(int, ends))]
parallel.flash_attn_varlen_func = lambda q, k, v, **options: scaled_dot_product_attention(
    *(x.transpose(0, 1) for x in (q, k, v)), is_causal=True
).transpose(0, 1)
parallel.flash_attn_func = parallel.flash_attn_varlen_func
torch.manual_seed(0)
(q, k, v), beta = torch.randn(3, 1, 12, 2, 16), torch.rand(1, 12, 2)
mask, ones = torch.LongTensor([[0] * 5 + [1] * 7]), torch.LongTensor([[1] * 7])
padded = parallel.deltaformer_attn(q, k, v, beta, mask)[:, 5:]
alone = parallel.deltaformer_attn(q[:, 5:], k[:, 5:], v[:, 5:], beta[:, 5:], ones)
error = ((padded - alone).abs().max() / alone.abs().max()).item()
print(f"5 of padding move outputs by {error:.1e}")
sys.exit(error > 1e-3)

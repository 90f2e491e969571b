# pip install flash-linear-attention==0.6.0
"""Gradients: where C, 512 by default, does not divide T > C, the backward of deltaformer_attn
counts its chunks from the end (ops/deltaformer/parallel.py:559) and reads memory not written."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
import torch
from fla.ops.deltaformer import parallel
from fla.ops.deltaformer.naive import naive_deltaformer_attn as naive
from torch.nn.functional import scaled_dot_product_attention
from triton.runtime.autotuner import Autotuner

torch.use_deterministic_algorithms(True)  # fills new memory with NaN
Autotuner._bench = lambda self, *args, **kwargs: [0.0]
# Kernels cast their loop's index. PyTorch's attention stands in for flash-attn's.
Index = type("Index", (int,), {"to": lambda self, dtype: self})
parallel.__dict__["range"] = lambda *ends: [Index(i) for i in range(*map(int, ends))]
parallel.flash_attn_func = lambda q, k, v, **options: scaled_dot_product_attention(
    *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
).transpose(1, 2)
errors = {}
for tokens in (64, 80):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, tokens, 1, 16).requires_grad_() for _ in range(3))
    beta = torch.rand(1, tokens, 1).requires_grad_()
    outputs = parallel.deltaformer_attn(q, k, v, beta, C=32), naive(q, k, v, beta)
    got, want = (torch.autograd.grad(o.square().sum(), (q, k, v, beta)) for o in outputs)
    differences = [(a - b).abs().max() / b.abs().max() for a, b in zip(got, want, strict=True)]
    errors[tokens] = torch.stack(differences).max().item()
print("; ".join(f"{t} tokens: gradients differ by {e:.1e}" for t, e in errors.items()))
sys.exit(not all(e < 1e-3 for e in errors.values()))

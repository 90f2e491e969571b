# pip install flash-linear-attention==0.6.0
"""Forms: the recurrent reference of Comba reads its state after the decay (ops/comba/naive.py:57,
:59), the chunked one, and the kernel, before it."""

import sys
from importlib import import_module

import torch
from torch.nn.functional import normalize

naive = import_module("fla.ops.comba.naive")
worst = 0.0
for decay in (0.0, 1.0):
    for seed in (0, 1):
        torch.manual_seed(seed)
        q, k, v, p = torch.randn(4, 1, 64, 2, 8)
        given = {"q": q, "k": normalize(k, dim=-1), "v": v, "p": normalize(p, dim=-1)}
        given |= {"g": -decay * torch.rand(1, 64, 2), "beta": torch.rand(1, 64, 2)}
        step, chunk = naive.naive_recurrent_comba(**given)[0], naive.naive_chunk_comba(**given)[0]
        error = ((chunk - step).abs().max() / step.abs().max()).item()
        print(f"decay {decay}, seed {seed}: {error:.1e}")
        worst = max(worst, error)
print(f"chunked and recurrent outputs differ by {worst:.1e}")
sys.exit(worst > 1e-3)

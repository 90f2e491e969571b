# pip install flash-linear-attention==0.6.0
"""Lengths: naive_chunk_hgrn takes one chunk alone, as it views gates as [batch, chunk_size, width]
(ops/hgrn/naive.py:48)."""

import sys
from importlib import import_module

import torch

chunked = import_module("fla.ops.hgrn.naive").naive_chunk_hgrn
refused = []
for length in (64, 128, 192):
    x, g = torch.randn(2, length, 8), -torch.rand(2, length, 8)
    try:
        chunked(x, g, chunk_size=64)
    except RuntimeError as error:
        print(f"{length}: {error}")
        refused.append(length)
print(f"with chunks of 64, refuses {refused}")
sys.exit(bool(refused))

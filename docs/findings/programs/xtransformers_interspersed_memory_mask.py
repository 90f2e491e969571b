# pip install x-transformers==2.31.10
"""Padding: TransformerWrapper(memory_tokens_interspersed_every=4) takes no mask at all, as the
mask is not made longer with the sequence (x_transformers.py:4371)."""

import sys
from importlib import import_module

import torch

package = import_module("x_transformers")
model = package.TransformerWrapper(
    num_tokens=64,
    max_seq_len=32,
    num_memory_tokens=2,
    memory_tokens_interspersed_every=4,
    attn_layers=package.Decoder(dim=32, depth=1, heads=2, attn_dim_head=16),
)
ids = torch.arange(8)[None]
print("without a mask:", *model(ids).shape)
try:
    print("with a mask of ones:", *model(ids, mask=ids >= 0).shape)
except RuntimeError as error:
    print("with a mask of ones:", error)
    sys.exit(1)

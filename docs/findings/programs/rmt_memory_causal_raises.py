# pip install recurrent-memory-transformer-pytorch==0.7.0
"""Lengths: RecurrentMemoryTransformer(memory_not_causal=False) takes none, as its mask is made for
as many keys as queries after one more key was added (attend.py:136)."""

import sys
from importlib import import_module

import torch

transformer = import_module("recurrent_memory_transformer_pytorch").RecurrentMemoryTransformer
for memory_not_causal in (True, False):
    model = transformer(
        num_tokens=64,
        dim=16,
        depth=1,
        num_memory_tokens=3,
        seq_len=16,
        heads=2,
        dim_head=8,
        memory_not_causal=memory_not_causal,
    )
    try:
        print(f"{memory_not_causal=}:", *model(torch.arange(16)[None])[0].shape)
    except RuntimeError as error:
        print(f"{memory_not_causal=}: {error}")
        sys.exit(1)

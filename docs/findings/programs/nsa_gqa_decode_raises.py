# pip install native-sparse-attention-pytorch==0.2.3
"""Decoding: SparseAttention(kv_heads=2, query_heads_share_selected_kv=False) of four heads does
not repeat its keys for the heads in a cached step (native_sparse_attention.py:491)."""

import sys
from importlib import import_module

import torch

attention = import_module("native_sparse_attention_pytorch").SparseAttention
blocks = {"compress_block_size": 4, "compress_block_sliding_stride": 2, "selection_block_size": 4}
heads = {"heads": 4, "kv_heads": 2, "dim_head": 8, "query_heads_share_selected_kv": False}
module = attention(16, causal=True, sliding_window_size=4, num_selected_blocks=2, **blocks, **heads)
x = torch.randn(1, 12, 16)
print("whole:", *module(x).shape)
_, cache = module(x[:, :11], return_cache=True)
try:
    print("step:", *module(x[:, 11:], cache=cache, return_cache=True)[0].shape)
except RuntimeError as error:
    print("step:", error)
    sys.exit(1)

# pip install x-transformers==2.31.10
"""Raises: Decoder(attn_sparse_topk=k) on fewer than k tokens, so it can generate from no shorter
prompt (attend.py:162)."""

import sys
from importlib import import_module

import torch

sizes = {"dim": 32, "depth": 1, "heads": 2, "attn_dim_head": 16, "verbose": False}
torch.manual_seed(0)
decoder = import_module("x_transformers").Decoder(**sizes, attn_sparse_topk=8)
words = {}
for length in (8, 7):
    try:
        words[length] = f"returns {list(decoder(torch.randn(1, length, 32)).shape)}"
    except RuntimeError as error:
        words[length] = f"raises {error}"
print(f"given 7 tokens, the decoder {words[7]}; given 8, it {words[8]}")
sys.exit(words[7].startswith("raises"))

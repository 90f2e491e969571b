# pip install x-transformers==2.31.10
"""Raises: Decoder(attn_use_cope=True, attn_cope_soft_onehot_pos=True) names two axes for scores of
four (x_transformers.py:565)."""

import sys
from importlib import import_module

import torch

sizes = {"dim": 32, "depth": 1, "heads": 2, "attn_dim_head": 16, "verbose": False}
words = {}
for soft in (False, True):
    torch.manual_seed(0)
    decoder = import_module("x_transformers").Decoder(
        **sizes, attn_use_cope=True, attn_cope_soft_onehot_pos=soft
    )
    try:
        words[soft] = f"returns {list(decoder(torch.randn(1, 6, 32)).shape)}"
    except Exception as error:  # einx has errors of its own
        words[soft] = f"raises {type(error).__name__}"
print(f"with soft one-hot positions a decoder {words[True]}, without {words[False]}")
sys.exit(words[True].startswith("raises"))

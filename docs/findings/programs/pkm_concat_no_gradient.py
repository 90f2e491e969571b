# pip install product-key-memory==0.3.0
"""Gradient: PKM(concat_values_and_combine=True) does not use the weights of what it looks up
(product_key_memory.py:234), so that keys and queries never learn."""

import sys
from importlib import import_module

import torch

memory = import_module("product_key_memory").PKM
without = []
for seed in (0, 1):
    torch.manual_seed(seed)
    module = memory(16, heads=2, num_keys=8, topk=4, dim_head=8, concat_values_and_combine=True)
    x = torch.randn(2, 5, 16, requires_grad=True)
    module(x).sum().backward()
    without = [name for name, p in module.named_parameters() if p.grad is None]
    print(f"seed {seed}: gradient of the input: {x.grad}")
print(f"no gradient for {', '.join(without) or 'none'}")
sys.exit(bool(without))

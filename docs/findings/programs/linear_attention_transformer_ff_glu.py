# pip install linear-attention-transformer==0.19.1
"""Options: LinearAttentionTransformer builds its feedforwards without ff_glu and ff_dropout
(linear_attention_transformer.py:388)."""

import sys
from importlib import import_module

import torch

transformer = import_module("linear_attention_transformer").LinearAttentionTransformer
x = torch.randn(1, 8, 16)
outputs = []
for options in ({}, {"ff_glu": True, "ff_dropout": 0.9}):
    torch.manual_seed(0)
    module = transformer(dim=16, heads=2, depth=2, max_seq_len=8, **options).train()
    outputs.append(module(x))
    print(f"{', '.join(options) or 'defaults'}: {sum(p.numel() for p in module.parameters())}")
difference = (outputs[0] - outputs[1]).abs().max().item()
print(f"with and without both options, outputs in training differ by {difference:.1e}")
sys.exit(difference == 0)

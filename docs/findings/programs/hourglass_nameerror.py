# pip install hourglass-transformer-pytorch==0.0.6
"""Lengths: HourglassTransformerLM calls math.ceil, and has not imported math
(hourglass_transformer_pytorch.py:19), for lengths that shorten_factor does not divide."""

import sys
from importlib import import_module

import torch

model = import_module("hourglass_transformer_pytorch").HourglassTransformerLM(
    num_tokens=64, dim=16, max_seq_len=32, depth=(1, 1, 1), shorten_factor=2, heads=2, dim_head=8
)
print("8 tokens:", *model(torch.arange(8)[None]).shape)
try:
    print("7 tokens:", *model(torch.arange(7)[None]).shape)
except NameError as error:
    print("7 tokens:", error)
    sys.exit(1)

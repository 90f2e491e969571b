# pip install token-shift-gpt==0.0.2
"""Lengths: TokenShiftGPT shifts by more tokens than a short sequence has (token_shift_gpt.py:14),
and takes none below half of max_seq_len."""

import sys
from importlib import import_module

import torch

model = import_module("token_shift_gpt").TokenShiftGPT(
    num_tokens=64, dim=64, max_seq_len=64, depth=2
)
refused = []
for length in range(1, 65):
    try:
        model(torch.arange(length)[None])
    except RuntimeError:
        refused.append(length)
print(f"refuses {len(refused)} of 64 lengths: {refused[:1]} to {refused[-1:]}")
sys.exit(bool(refused))

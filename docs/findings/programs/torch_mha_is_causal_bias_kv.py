# pip install torch==2.13.0
"""Hint: MultiheadAttention drops the mask when told is_causal, without weights asked for
(nn/functional.py:6817); the key that add_bias_kv or add_zero_attn puts last is then never seen."""

import sys

import torch
from torch import nn

worst = 0.0
for option in ("add_bias_kv", "add_zero_attn"):
    for seed in (0, 1):
        torch.manual_seed(seed)
        module = nn.MultiheadAttention(16, 4, batch_first=True, **{option: True}).double()
        x = torch.randn(2, 6, 16, dtype=torch.float64)
        mask = torch.full((6, 6), float("-inf"), dtype=torch.float64).triu(1)
        masked = module(x, x, x, attn_mask=mask, need_weights=False)[0]
        hinted = module(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
        error = ((hinted - masked).abs().max() / masked.abs().max()).item()
        hinted.sum().backward()
        added = [p.grad for name, p in module.named_parameters() if name.startswith("bias_")]
        dead = sum(grad is not None and not grad.any() for grad in added)
        print(f"{option}, seed {seed}: {error:.1e}; {dead} parameters with a gradient of 0")
        worst = max(worst, error)
print(f"with the hint and without, outputs differ by {worst:.1e}")
sys.exit(worst > 1e-9)

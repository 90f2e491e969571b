# pip install CoLT5-attention==0.11.2
"""Rows of a batch: with r > 1 routing tokens x is repeated to (b r) rows
(transformer_block.py:424) and then indexed by b (:482): row b gets tokens of row b // r."""

import sys
from importlib import import_module

import torch

colt5 = import_module("colt5_attention")
heads = {"light_heads": 2, "light_dim_head": 8, "heavy_heads": 2, "heavy_dim_head": 8}
heavy = {"num_heavy_tokens_q": 4, "num_heavy_tokens_kv": 4, "num_routed_kv": 2}
worst = 0.0
for seed in (0, 1):
    torch.manual_seed(seed)
    x = torch.randn(4, 12, 16, dtype=torch.float64)
    routed = colt5.CoordinateDescentRouter(16, num_routing_tokens=2).double()(x, num_tokens=4)
    for b in range(4):
        chosen = routed.indices[b]
        owners = [i for i in range(4) if torch.equal(x[i][chosen], routed.routed_tokens[b])]
        print(f"seed {seed}: row {b} is given tokens of row {owners}")
    module = colt5.ConditionalRoutedAttention(16, **heavy, **heads).double().eval()
    with torch.no_grad():
        y, alone = module(x)[1:2], module(x[1:2])
    worst = max(worst, ((y - alone).abs().max() / alone.abs().max()).item())
print(f"a row in its batch and alone differ by {worst:.1e}")
sys.exit(worst > 1e-9)

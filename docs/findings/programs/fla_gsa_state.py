# pip install flash-linear-attention==0.6.0
"""Decoding: naive_recurrent_gsa without g normalises by a running sum that its final state lacks
(ops/gsa/naive.py:30), and that begins anew when it goes on; naive_recurrent_abc is the same."""

import sys
from importlib import import_module

import torch

recurrent = import_module("fla.ops.gsa.naive").naive_recurrent_gsa
worst = 0.0
for seed in (0, 1):
    torch.manual_seed(seed)
    given = torch.randn(4, 1, 40, 2, 8)
    whole, _ = recurrent(*given)
    _, state = recurrent(*given[:, :, :20], output_final_state=True)
    rest, _ = recurrent(*given[:, :, 20:], initial_state=state)
    worst = max(worst, ((rest - whole[:, 20:]).abs().max() / whole.abs().max()).item())
print(f"the second half after the first, and within the whole, differ by {worst:.1e}")
sys.exit(worst > 1e-3)

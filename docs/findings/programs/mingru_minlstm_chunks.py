# pip install minGRU-pytorch==0.2.1
"""Chunks: minLSTM, given more than one token, adds a half to the state that it goes on from, as it
applies g to what is positive already (minLSTM.py:48); minGRU takes the logarithm, and is right."""

import sys
from importlib import import_module

import torch

kinds = {
    "minGRU": import_module("minGRU_pytorch").minGRU,
    "minLSTM": import_module("minGRU_pytorch.minLSTM").minLSTM,
}
worst = 0.0
for name, kind in kinds.items():
    for seed in (0, 1):
        torch.manual_seed(seed)
        module, x = kind(16).double(), torch.randn(1, 12, 16, dtype=torch.float64)
        with torch.no_grad():
            whole = module(x)
            _, state = module(x[:, :6], return_next_prev_hidden=True)
            rest = module(x[:, 6:], prev_hidden=state)
        error = ((rest - whole[:, 6:]).abs().max() / whole.abs().max()).item()
        print(f"{name}, seed {seed}: {error:.1e}")
        worst = max(worst, error)
print(f"the second half after the first, and within the whole, differ by {worst:.1e}")
sys.exit(worst > 1e-9)

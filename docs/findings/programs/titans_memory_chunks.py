# pip install titans-pytorch==0.5.5
"""Chunks: NeuralMemory pairs tokens with updates as if each call of several tokens began at a
chunk's border (neural_memory.py:856), though its state may end within one."""

import sys
from importlib import import_module

import torch

memory = import_module("titans_pytorch").NeuralMemory
worst = 0.0
for seed in (0, 1):
    torch.manual_seed(seed)
    module = memory(dim=16, chunk_size=4).double().eval()
    x = torch.randn(1, 8, 16, dtype=torch.float64)
    whole, _ = module(x)
    for parts in ((4, 4), (1,) * 8, (1, 3, 4)):
        state, outputs = None, []
        for part in x.split(parts, dim=1):
            y, state = module(part, state=state)
            outputs.append(y)
        worst = ((torch.cat(outputs, 1) - whole).abs().max() / whole.abs().max()).item()
        print(f"seed {seed}, parts of {parts}: {worst:.1e}")
print(f"parts of 1, 3 and 4 tokens, and the whole, differ by {worst:.1e}")
sys.exit(worst > 1e-9)

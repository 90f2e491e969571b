# pip install titans-pytorch==0.5.5
"""Decoding: the cache keeps the last keys across a segment's border and drops them when their
number divides (mac_transformer.py:877, :881): right for prompts of whole segments only."""

import sys
from importlib import import_module

import torch

transformer = import_module("titans_pytorch").MemoryAsContextTransformer
worst = 0.0
for prompt in (8, 6, 5):
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = transformer(num_tokens=64, dim=16, depth=2, segment_len=4, dim_head=8, heads=2)
        ids, cache, errors = torch.randint(0, 64, (1, 12)), None, []
        with torch.no_grad():
            whole = model.eval()(ids)
            for t in range(prompt, 13):
                step, cache = model(ids[:, :t], cache=cache, return_cache=True)
                error = (step[:, -1] - whole[:, t - 1]).abs().max() / whole.abs().max()
                errors.append(error.item())
        print(f"segments of 4, prompt {prompt}, seed {seed}: {max(errors):.1e}")
        worst = max(worst, *errors)
print(f"a cached step and the whole differ by {worst:.1e}")
sys.exit(worst > 1e-3)

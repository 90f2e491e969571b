# pip install local-attention==1.11.2
"""Decoding: LocalTransformer keeps keys that are already rotated (transformer.py:152, :169) and
rotates them again at every step, so that all but the first cached step differ from the whole."""

import sys
from importlib import import_module

import torch

transformer = import_module("local_attention").LocalTransformer
sizes = {"dim": 32, "depth": 2, "heads": 2, "dim_head": 16, "local_attn_window_size": 16}
worst = 0.0
for seed in (0, 1):
    torch.manual_seed(seed)
    model = transformer(num_tokens=64, max_seq_len=64, **sizes).double().eval()
    ids = torch.randint(0, 64, (1, 12))
    with torch.no_grad():
        whole = model(ids)
        _, cache = model(ids[:, :4], return_cache=True)
        for t in range(4, 12):
            step, cache = model(ids[:, : t + 1], cache=cache, return_cache=True)
            error = ((step[:, -1] - whole[:, t]).abs().max() / whole.abs().max()).item()
            print(f"seed {seed}, token {t}: {error:.1e}")
            worst = max(worst, error)
print(f"a cached step and the whole differ by {worst:.1e}")
sys.exit(worst > 1e-9)

# pip install x-transformers==2.31.10
"""Decoding: in a cached step only the newest token reaches ShiftTokens (x_transformers.py:1608) and
the running sum of data-dependent ALiBi's gates (:728), while can_cache_kv stays True."""

import sys
from importlib import import_module

import torch

package = import_module("x_transformers")
alibi = {"attn_data_dependent_alibi": True}
worst = 0.0
for options in ({"shift_tokens": 1}, alibi, {**alibi, "attn_data_dependent_alibi_per_row": True}):
    for seed in (0, 1):
        torch.manual_seed(seed)
        layers = package.Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, **options)
        model = package.TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers)
        model, ids = model.double().eval(), torch.randint(0, 64, (1, 12))
        with torch.no_grad():
            whole = model(ids)
            _, cache = model(ids[:, :11], return_intermediates=True)
            step, _ = model(ids, cache=cache, return_intermediates=True)
        error = ((step[:, -1] - whole[:, -1]).abs().max() / whole.abs().max()).item()
        print(f"{', '.join(options)}, seed {seed}: {error:.1e}")
        worst = max(worst, error)
print(f"a cached step and the whole differ by {worst:.1e}")
sys.exit(worst > 1e-9)

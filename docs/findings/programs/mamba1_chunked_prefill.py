# pip install transformers==5.23.0
"""Chunks: Mamba-1 mixers begin at a state of zero whenever a call holds more than one token
(modeling_mamba.py:442; FalconMamba, Jamba and Zamba alike)."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
sizes = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 8}
worst = {1: 0.0, 6: 0.0}
for name in ("Mamba", "FalconMamba"):
    config = getattr(transformers, f"{name}Config")(**sizes)
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        ids = torch.randint(3, 48, (1, 24))
        with torch.no_grad():
            whole = model(ids).logits
            for size in worst:
                cache, parts = None, []
                for t in range(0, 24, size):
                    out = model(ids[:, t : t + size], use_cache=True, cache_params=cache)
                    cache, parts = out.cache_params, [*parts, out.logits]
                error = (torch.cat(parts, 1) - whole).abs().max() / whole.abs().max()
                worst[size] = max(worst[size], error.item())
print(f"six tokens at a time and the whole differ by {worst[6]:.1e} (one: {worst[1]:.1e})")
sys.exit(worst[6] > 1e-3)

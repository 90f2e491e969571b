# pip install transformers==5.23.0
"""Raises: Bamba and GraniteMoeHybrid as configured by default, and any other model whose layers all
are recurrent, ask a cache for a length that it does not count (cache_utils.py:1723)."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_d_head": 8}
raised = 0
for name in ("Bamba", "GraniteMoeHybrid"):
    config = getattr(transformers, f"{name}Config")(**sizes, **heads, mamba_d_state=8)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    ids = torch.randint(3, 48, (1, 12))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        try:
            cache, steps = None, []
            for t in range(12):
                found = model(ids[:, t : t + 1], past_key_values=cache)
                cache, steps = found.past_key_values, [*steps, found.logits]
            error = (torch.cat(steps, 1) - whole).abs().max() / whole.abs().max()
            print(f"{name}: steps and the whole differ by {error:.1e}")
        except ValueError as error:
            raised += 1
            print(f"{name}: {error!s:.90}")
sys.exit(raised > 0)

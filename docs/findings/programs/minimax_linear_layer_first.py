# pip install transformers==5.23.0
"""Decoding: the cache of a MiniMax whose first layer is linear attention says for ever that it
holds no token, for it asks layer 0, which keeps no keys (cache_utils.py:1728)."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "block_size": 8}
last = 0.0
for kinds in (["full_attention", "linear_attention"], ["linear_attention", "full_attention"]):
    torch.manual_seed(0)
    config = transformers.MiniMaxConfig(
        **sizes, **heads, num_local_experts=2, initializer_range=0.2, layer_types=kinds
    )
    model = transformers.MiniMaxForCausalLM(config).eval()
    ids = torch.randint(3, 48, (1, 20))
    with torch.no_grad():
        whole = model(ids).logits
        cache = model(ids[:, :10], use_cache=True).past_key_values
        length = cache.get_seq_length()
        steps = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(10, 20)]
    last = ((torch.cat(steps, 1) - whole[:, 10:]).abs().max() / whole.abs().max()).item()
    print(f"{kinds[0]} first, 10 tokens, a length of {length}: steps and the whole", end=" ")
    print(f"differ by {last:.1e}")
sys.exit(last > 1e-2)

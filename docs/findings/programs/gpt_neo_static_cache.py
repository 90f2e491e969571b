# pip install transformers==5.23.0
"""Decoding: GPT-Neo's local layers take the window's rows from the number of keys
(modeling_gpt_neo.py:115), which with a StaticCache is its size, not what it holds."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4}
worst = {"global": 0.0, "local": 0.0}
for second in worst:
    kinds = {"num_layers": 2, "attention_types": [[["global", second], 1]], "window_size": 8}
    config = transformers.GPTNeoConfig(**sizes, **kinds, initializer_range=0.2)
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = transformers.GPTNeoForCausalLM(config).double().eval()
        ids = torch.randint(3, 48, (1, 30))
        cache = transformers.StaticCache(config=config, max_cache_len=40)
        with torch.no_grad():
            whole = model(ids).logits
            steps = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(30)]
        error = (torch.cat(steps, 1) - whole).abs().max() / whole.abs().max()
        worst[second] = max(worst[second], error.item())
print(f"with global layers alone {worst['global']:.1e}")
print(f"steps with a StaticCache and the whole differ by {worst['local']:.1e}")
sys.exit(worst["local"] > 1e-3)

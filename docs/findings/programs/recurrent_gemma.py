# pip install transformers==5.23.0
"""Chunks: RecurrentGemma writes its convolution's state in a call of several tokens, and does
not read it there (modeling_recurrent_gemma.py:443): a second prefill forgets the first."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8, "lru_width": 32}
config = transformers.RecurrentGemmaConfig(**sizes, **heads, attention_window_size=64)
worst = {1: 0.0, 10: 0.0}
for seed in (0, 1):
    torch.manual_seed(seed)
    model = transformers.RecurrentGemmaForCausalLM(config).double().eval()
    ids = torch.randint(3, 48, (1, 20))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        for size in worst:
            cache, parts = transformers.DynamicCache(config=config), []
            for t in range(0, 20, size):
                at = {"position_ids": torch.arange(t, t + size)[None], "past_key_values": cache}
                parts.append(model(ids[:, t : t + size], use_cache=True, **at).logits)
            error = (torch.cat(parts, 1) - whole).abs().max()
            worst[size] = max(worst[size], (error / whole.abs().max()).item())
print(f"ten tokens at a time and the whole differ by {worst[10]:.1e} (one: {worst[1]:.1e})")
sys.exit(worst[10] > 1e-3)

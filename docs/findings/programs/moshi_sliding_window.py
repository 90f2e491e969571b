# pip install transformers==5.23.0
"""Decoding: Moshi masks a prefill as causal alone (modeling_moshi.py:775), and keeps a cache of a
window (:787), 3000 by default, here 8: a step sees the window, a prefill all."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
moshi = import_module("transformers.models.moshi.configuration_moshi").MoshiConfig
sizes = {"vocab_size": 48, "audio_vocab_size": 48, "hidden_size": 32, "ffn_dim": 48}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
worst = {64: 0.0, 8: 0.0}
for window in worst:
    config = moshi(**sizes, **heads, num_hidden_layers=2, sliding_window=window)
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = transformers.MoshiForCausalLM(config).double().eval()
        for p in model.parameters():
            p.data += 0.2 * torch.randn_like(p)
        ids = torch.randint(3, 47, (1, 30))
        with torch.no_grad():
            whole = model(ids).logits
            cache = model(ids[:, :1], use_cache=True).past_key_values
            steps = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(1, 30)]
        error = (torch.cat(steps, 1) - whole[:, 1:]).abs().max() / whole.abs().max()
        worst[window] = max(worst[window], error.item())
print(f"steps and the whole differ by {worst[8]:.1e} (below the window {worst[64]:.1e})")
sys.exit(worst[8] > 1e-2)

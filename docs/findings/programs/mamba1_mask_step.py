# pip install transformers==5.23.0
"""Decoding: Mamba multiplies a step's one token by the whole attention mask (modeling_mamba.py:55),
which makes copies of it that fill the convolution's cache; generate() leaves the mask out."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
sizes = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
worst = {False: 0.0, True: 0.0}
for seed in (0, 1):
    torch.manual_seed(seed)
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)).double().eval()
    ids = torch.randint(3, 48, (1, 20))
    with torch.no_grad():
        whole = model(ids).logits
        for masked in worst:
            cache, steps = None, []
            for t in range(20):
                mask = torch.ones_like(ids[:, : t + 1]) if masked else None
                step = ids[:, t : t + 1]
                out = model(step, cache_params=cache, use_cache=True, attention_mask=mask)
                cache, steps = out.cache_params, [*steps, out.logits]
            error = (torch.cat(steps, 1) - whole).abs().max() / whole.abs().max()
            worst[masked] = max(worst[masked], error.item())
print(f"steps with a mask of ones and the whole differ by {worst[True]:.1e}", end=" ")
print(f"(without a mask {worst[False]:.1e})")
sys.exit(worst[True] > 1e-3)

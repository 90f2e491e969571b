# pip install transformers==5.23.0
"""Decoding: positions that Bamba makes itself begin at 0 in every call (modeling_bamba.py:971),
whatever its cache holds; generate() gives positions, a loop of one's own may not."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
mamba = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_layer_indices": [1]}
config = transformers.BambaConfig(**sizes, **mamba, **heads, initializer_range=0.2)
worst = {True: 0.0, False: 0.0}
for seed in (0, 1):
    torch.manual_seed(seed)
    model = transformers.BambaForCausalLM(config).double().eval()
    ids = torch.randint(3, 48, (1, 20))
    with torch.no_grad():
        whole = model(ids).logits[:, 10:]
        for given in worst:
            cache, steps = model(ids[:, :10], use_cache=True).past_key_values, []
            for t in range(10, 20):
                place = {"position_ids": torch.tensor([[t]])} if given else {}
                steps.append(model(ids[:, t : t + 1], past_key_values=cache, **place).logits)
            error = (torch.cat(steps, 1) - whole).abs().max() / whole.abs().max()
            worst[given] = max(worst[given], error.item())
print(f"steps and the whole differ by {worst[False]:.1e} (positions given: {worst[True]:.1e})")
sys.exit(worst[False] > 1e-3)

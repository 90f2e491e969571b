# pip install transformers==5.23.0
"""Rows of a batch: a cache layer of state and keys inherits batch_select_indices from that of
keys (cache_utils.py:1251), which leaves the states' rows where they were; with Falcon-H1."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "mamba_d_ssm": 64}
mamba = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
config = transformers.FalconH1Config(**sizes, **heads, **mamba, initializer_range=0.2)
worst, rows = {"reorder_cache": 0.0, "batch_select_indices": 0.0}, torch.tensor([2, 0, 1])
for seed in (0, 1):
    torch.manual_seed(seed)
    model = transformers.FalconH1ForCausalLM(config).double().eval()
    ids = torch.randint(3, 48, (3, 13))
    with torch.no_grad():
        whole = model(ids[rows]).logits[:, 12:]
        for how in worst:
            cache = model(ids[:, :12], use_cache=True).past_key_values
            getattr(cache, how)(rows)
            step = model(ids[rows, 12:], past_key_values=cache).logits
            worst[how] = max(worst[how], ((step - whole).abs().max() / whole.abs().max()).item())
print(f"after reorder_cache a step and the whole differ by {worst['reorder_cache']:.1e}")
print(f"after batch_select_indices by {worst['batch_select_indices']:.1e}")
sys.exit(worst["batch_select_indices"] > 1e-3)

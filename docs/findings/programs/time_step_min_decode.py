# pip install transformers==5.23.0
"""Decoding: Zamba2 keeps time steps above time_step_min, 0.001 by default, in a prefill alone
(modeling_zamba2.py:669), and so does Nemotron-H (modeling_nemotron_h.py:414)."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "attention_head_dim": 16}
mamba = {"n_mamba_heads": 8, "mamba_headdim": 8, "mamba_d_state": 8, "chunk_size": 8}
layers = {"layers_block_type": ["linear_attention", "hybrid"], "initializer_range": 0.1}
errors = {1e-30: 0.0, 0.001: 0.0}
for least in errors:
    config = transformers.Zamba2Config(**sizes, **heads, **mamba, **layers, time_step_min=least)
    torch.manual_seed(0)
    model = transformers.Zamba2ForCausalLM(config).double().eval()
    for name, p in model.named_parameters():
        if name.endswith(("dt_bias", ".D")):  # time steps of 3e-4, and no way past the state
            p.data.fill_(-8.0 if name.endswith("dt_bias") else 0.0)
    ids = torch.randint(3, 48, (1, 40))
    with torch.no_grad():
        whole, cache = model(ids).logits, model(ids[:, :1], use_cache=True).past_key_values
        steps = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(1, 40)]
    errors[least] = ((torch.cat(steps, 1) - whole[:, 1:]).abs().max() / whole.abs().max()).item()
print(f"steps and the whole differ by {errors[0.001]:.1e} (without a least {errors[1e-30]:.1e})")
sys.exit(errors[0.001] > 2e-4)

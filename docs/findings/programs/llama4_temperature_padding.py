# pip install transformers==5.23.0
"""Padding: Llama 4 tunes its temperature by places in the padded row, not by position_ids
(modeling_llama4.py:361); it does so by default, from floor_scale on, 8192, here 8."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 48}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "floor_scale": 8}
layers = {"num_hidden_layers": 2, "moe_layers": [], "no_rope_layers": [1, 0]}
worst = {False: 0.0, True: 0.0}
for tuning in worst:
    config = transformers.Llama4TextConfig(
        **sizes, **heads, **layers, initializer_range=0.2, attn_temperature_tuning=tuning
    )
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(config).double().eval()
    ids = torch.randint(3, 48, (1, 26))
    mask = (torch.arange(26) >= 6).long()[None]
    place = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        alone = model(ids[:, 6:]).logits
        padded = model(ids, attention_mask=mask, position_ids=place).logits[:, 6:]
    worst[tuning] = ((padded - alone).abs().max() / alone.abs().max()).item()
print(f"with six tokens of left padding, and without, logits differ by {worst[True]:.1e}", end=" ")
print(f"(without tuning {worst[False]:.1e})")
sys.exit(worst[True] > 1e-3)

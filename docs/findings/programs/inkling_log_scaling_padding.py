# pip install transformers==5.23.0
"""Padding: Inkling scales its logits by places in the padded row, not by position_ids
(modeling_inkling.py:257), as soon as log_scaling_n_floor is set, here to 8."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "d_rel": 4}
sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
kinds = {"layer_types": ["hybrid"] * 2, "mlp_layer_types": ["dense"] * 2}
worst = {None: 0.0, 8: 0.0}
for floor in worst:
    config = import_module("transformers.models.inkling.configuration_inkling").InklingTextConfig(
        **heads, **sizes, **kinds, log_scaling_n_floor=floor, initializer_range=0.2
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    ids = torch.randint(3, 48, (1, 26))
    mask = (torch.arange(26) >= 6).long()[None]
    place = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        alone = model(ids[:, 6:]).logits
        padded = model(ids, attention_mask=mask, position_ids=place).logits[:, 6:]
    worst[floor] = ((padded - alone).abs().max() / alone.abs().max()).item()
print(f"with six tokens of left padding, and without, logits differ by {worst[8]:.1e}", end=" ")
print(f"(without scaling {worst[None]:.1e})")
sys.exit(worst[8] > 1e-3)

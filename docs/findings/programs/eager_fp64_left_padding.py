# pip install transformers==5.23.0
"""Padding: in float64 the eager mask holds the least double (masking_utils.py:630), -inf to a
softmax in float32: a padded row is NaN, and so is, as a value, what attends to it. In float32 and
bfloat16, in which these models are used, all is right."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
ids = torch.randint(3, 48, (2, 12))
mask = torch.ones_like(ids)
mask[0, :4] = 0
counts = {}
for attention in ("sdpa", "eager"):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=attention)
    with torch.no_grad():
        logits = model.double().eval()(ids, attention_mask=mask).logits
    counts[attention] = int(logits[mask.bool()].isnan().any(-1).sum())
print(f"of {int(mask.sum())} real tokens NaN: {counts}")
sys.exit(counts["eager"] > counts["sdpa"])

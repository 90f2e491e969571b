# pip install transformers==5.23.0
"""Padding: RecurrentGemma's recurrent blocks take no mask, so left padding enters the convolution
of the first tokens (modeling_recurrent_gemma.py:428, 445), in a batch that `generate` pads too."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
sizes = {"vocab_size": 48, "hidden_size": 32, "lru_width": 32, "intermediate_size": 48}
heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 3}
worst = {1: 0.0, 4: 0.0}
for width in worst:
    config = transformers.RecurrentGemmaConfig(**sizes, **heads, conv1d_width=width)
    torch.manual_seed(0)
    model = transformers.RecurrentGemmaForCausalLM(config).double().eval()
    ids = torch.randint(3, 48, (1, 26))
    mask = (torch.arange(26) >= 6).long()[None]
    place = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        alone = model(ids[:, 6:], use_cache=False).logits
        padded = model(ids, attention_mask=mask, position_ids=place, use_cache=False).logits[:, 6:]
    worst[width] = ((padded - alone).abs().max() / alone.abs().max()).item()
print(f"with six tokens of left padding, and without, logits differ by {worst[4]:.1e}", end=" ")
print(f"(without a convolution {worst[1]:.1e})")
sys.exit(worst[4] > 1e-3)

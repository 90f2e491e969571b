# pip install transformers==5.23.0
"""Padding: LFM2 (modeling_lfm2.py:352), Mamba-2 (modeling_mamba2.py:477) and others set padding to
zero, but the next projection has a bias, an option, which then enters the convolution."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
sizes = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
lfm2 = {**heads, "layer_types": ["conv", "full_attention"]}
mamba2 = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1}
cases = (("Lfm2", "conv_bias", lfm2), ("Mamba2", "use_bias", mamba2))
ids, mask = torch.arange(3, 29)[None], (torch.arange(26) >= 6).long()[None]
worst = {False: 0.0, True: 0.0}
for name, option, options in cases:
    for bias in worst:
        config = getattr(transformers, f"{name}Config")(**sizes, **options, **{option: bias})
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config).double().eval()
        for p in model.parameters():
            p.data += 0.1 * torch.randn_like(p)
        with torch.no_grad():
            alone = model(ids[:, 6:]).logits
            padded = model(ids, attention_mask=mask).logits[:, 6:]
        worst[bias] = max(worst[bias], ((padded - alone).abs().max() / alone.abs().max()).item())
print(f"left padding moves logits by {worst[True]:.1e} (without that bias {worst[False]:.1e})")
sys.exit(worst[True] > 1e-3)

# pip install transformers==5.23.0
"""Causal: relative biases of ProphetNet's predict stream are laid out as [seq, ngram, heads]
(modeling_prophetnet.py:805) and read as [ngram, heads, seq] (:823): those of other positions."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
sizes = {"vocab_size": 48, "hidden_size": 32, "decoder_ffn_dim": 48, "ngram": 2}
layers = {"num_decoder_layers": 2, "num_decoder_attention_heads": 4, "add_cross_attention": False}
decoder = {"is_decoder": True, "is_encoder_decoder": False, "init_std": 0.2}
config = transformers.ProphetNetConfig(**sizes, **layers, **decoder)
future = cut = 0.0
for seed in (0, 1):
    torch.manual_seed(seed)
    model = transformers.ProphetNetForCausalLM(config).eval()
    ids = torch.randint(3, 48, (1, 9))
    later = ids.clone()
    later[0, 3] = (ids[0, 3] - 2) % 44 + 3
    with torch.no_grad():
        whole, moved, short = (model(x, use_cache=False).logits for x in (ids, later, ids[:, :8]))
    future = max(future, ((whole - moved)[:, :3].abs().max() / whole.abs().max()).item())
    cut = max(cut, ((whole[:, :8] - short).abs().max() / whole.abs().max()).item())
print(f"a later token moves earlier logits by {future:.1e}, cutting one off by {cut:.1e}")
sys.exit(future > 1e-3)

# pip install transformers==5.23.0
"""Decoding: Inkling asks a StaticCache for its length, a tensor, and adds it to the queries'
positions after `update` has changed it in place (modeling_inkling.py:243, 251)."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
inkling = import_module("transformers.models.inkling.configuration_inkling").InklingTextConfig
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "d_rel": 4}
sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
kinds = {"layer_types": ["hybrid"] * 2, "mlp_layer_types": ["dense"] * 2}
worst = {"dynamic": 0.0, "static": 0.0}
config = inkling(**heads, **sizes, **kinds, initializer_range=0.2)
for seed in (0, 1):
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    ids = torch.randint(3, 48, (1, 24))
    given = {"do_sample": False, "min_new_tokens": 6, "max_new_tokens": 6, "disable_compile": True}
    given |= {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    for cache in worst:
        found = model.generate(ids, cache_implementation=cache, **given)
        with torch.no_grad():
            whole = model(found.sequences).logits[:, 23:-1]
        error = (torch.stack(found.logits, 1) - whole).abs().max() / whole.abs().max()
        worst[cache] = max(worst[cache], error.item())
print(f"logits of generate with a StaticCache and of the whole differ by {worst['static']:.1e}")
sys.exit(worst["static"] > 1e-3)

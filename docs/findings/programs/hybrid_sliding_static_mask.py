# pip install transformers==5.23.0
"""Decoding: `generate` with a StaticCache masks layers of kind "hybrid_sliding" as causal alone
(masking_utils.py:1544), so a prompt longer than their window sees all of itself."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
inkling = import_module("transformers.models.inkling.configuration_inkling").InklingTextConfig
heads = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4}
sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
kinds = {"layer_types": ["hybrid_sliding"] * 2, "mlp_layer_types": ["dense"] * 2}
worst = {64: 0.0, 8: 0.0}
for window in worst:
    config = inkling(**heads, **sizes, **kinds, sliding_window_size=window, initializer_range=0.2)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    ids = torch.randint(3, 48, (1, 24))
    given = {"do_sample": False, "max_new_tokens": 1, "disable_compile": True, "pad_token_id": 0}
    given |= {"output_logits": True, "return_dict_in_generate": True}
    found = model.generate(ids, cache_implementation="static", **given)
    with torch.no_grad():
        whole = model(ids).logits[:, -1]
    worst[window] = ((found.logits[0] - whole).abs().max() / whole.abs().max()).item()
print(f"the first logits of generate and those of forward differ by {worst[8]:.1e}", end=" ")
print(f"(with a window longer than the prompt {worst[64]:.1e})")
sys.exit(worst[8] > 1e-3)

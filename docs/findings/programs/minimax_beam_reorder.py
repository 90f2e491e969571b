# pip install transformers==5.23.0
"""Rows of a batch: MiniMaxCache has no reorder_cache of its own (modeling_minimax.py:72): beam
search moves keys and values, and leaves linear attention's states where they were."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "block_size": 8}
config = transformers.MiniMaxConfig(**sizes, **heads, num_local_experts=2, initializer_range=0.2)
worst, order = 0.0, torch.tensor([2, 0, 1])
for seed in (0, 1):
    torch.manual_seed(seed)
    model = transformers.MiniMaxForCausalLM(config).eval()
    ids = torch.randint(3, 48, (3, 13))
    with torch.no_grad():
        whole = model(ids[order]).logits[:, 12:]
        cache = model(ids[:, :12], use_cache=True).past_key_values
        cache.reorder_cache(order)
        step = model(ids[order, 12:], past_key_values=cache).logits
    worst = max(worst, ((step - whole).abs().max() / whole.abs().max()).item())
    beams = {"num_beams": 4, "max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    texts = [model.generate(ids, **beams, pad_token_id=0, use_cache=c) for c in (True, False)]
    print(f"seed {seed}: of 48 tokens {int((texts[0] != texts[1]).sum())} differ without a cache")
print(f"a step after reorder_cache, and the whole, differ by {worst:.1e}")
sys.exit(worst > 1e-2)

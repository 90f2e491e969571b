# pip install transformers==5.23.0
"""Padding: DeepSeek-V4 compresses windows that it counts from the padded row's start, so left
padding is compressed and attended to (modeling_deepseek_v4.py:418; indexer 534; 650)."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
heads = {"num_attention_heads": 4, "head_dim": 16, "partial_rotary_factor": 0.5, "o_groups": 2}
sizes = {"vocab_size": 48, "hidden_size": 32, "moe_intermediate_size": 48, "num_hidden_layers": 2}
ranks = {"q_lora_rank": 16, "o_lora_rank": 16, "index_n_heads": 2, "index_head_dim": 16}
experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "mlp_layer_types": ["moe"] * 2}
rest = {"compress_rates": {"heavily_compressed_attention": 8, "compressed_sparse_attention": 4}}
worst = {}
for kind in ("sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"):
    kinds = {"layer_types": [kind] * 2, "sliding_window": 12, "initializer_range": 0.2}
    config = transformers.DeepseekV4Config(**heads, **sizes, **ranks, **experts, **rest, **kinds)
    torch.manual_seed(0)
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    ids, mask = torch.randint(3, 48, (1, 29)), (torch.arange(29) >= 5).long()[None]
    place = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        alone = model(ids[:, 5:], use_cache=False).logits
        padded = model(ids, attention_mask=mask, position_ids=place, use_cache=False).logits
    worst[kind] = ((padded[:, 5:] - alone).abs().max() / alone.abs().max()).item()
print("five tokens of left padding move logits by", {k: f"{v:.1e}" for k, v in worst.items()})
sys.exit(max(worst.values()) > 1e-2)

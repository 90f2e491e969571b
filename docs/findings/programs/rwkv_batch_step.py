# pip install transformers==5.23.0
"""Rows of a batch: a step of RWKV sets a state [b d] against its token [b 1 d], which makes
[b b d] (modeling_rwkv.py:251, :307): each row reads the others' states."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
sizes = {"vocab_size": 48, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2}
config = transformers.RwkvConfig(**sizes, rescale_every=0)
differ = 0
for seed in (0, 1):
    torch.manual_seed(seed)
    model = transformers.RwkvForCausalLM(config).eval()
    for p in model.parameters():
        p.data += 0.2 * torch.randn_like(p)
    ids = torch.randint(3, 48, (2, 12))
    with torch.no_grad():
        state = model(ids[:, :11], use_cache=True).state
        print("logits of a step [2 1]:", *model(ids[:, 11:], state=state).logits.shape)
        greedy = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
        batch = model.generate(ids, pad_token_id=0, **greedy)
        alone = [model.generate(ids[r : r + 1], pad_token_id=0, **greedy) for r in (0, 1)]
    differ += int((batch != torch.cat(alone)).sum())
print(f"of 48 tokens generated, {differ} differ between rows in a batch and alone")
sys.exit(differ > 0)

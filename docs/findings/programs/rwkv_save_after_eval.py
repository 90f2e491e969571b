# pip install transformers==5.23.0
"""Repeatable: RWKV divides its weights in place as it evaluates, where rescale_every > 0, 6 by
default (modeling_rwkv.py:634); saved then, they are divided again once loaded."""

import sys
from importlib import import_module
from tempfile import TemporaryDirectory

import torch

transformers = import_module("transformers")
sizes = {"vocab_size": 48, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 3}
config = transformers.RwkvConfig(**sizes, rescale_every=2)
worst = 0.0
for seed in (0, 1):
    torch.manual_seed(seed)
    model = transformers.RwkvForCausalLM(config).eval()
    for p in model.parameters():
        p.data += 0.2 * torch.randn_like(p)
    ids = torch.randint(3, 48, (2, 12))
    with torch.no_grad(), TemporaryDirectory() as folder:
        before = model(ids).logits
        model.save_pretrained(folder)
        after = transformers.RwkvForCausalLM.from_pretrained(folder).eval()(ids).logits
    worst = max(worst, ((after - before).abs().max() / before.abs().max()).item())
print(f"before saving and after loading, logits differ by {worst:.1e}")
sys.exit(worst > 1e-2)

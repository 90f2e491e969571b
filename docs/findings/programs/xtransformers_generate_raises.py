# pip install x-transformers==2.31.10
"""Decoding: generate raises with each of four options, for want of memory keys in a step's gates
(x_transformers.py:728), of a cache to cut, positions of one axis (:470), enough keys."""

import sys
from importlib import import_module

import torch

package, einops = import_module("x_transformers"), import_module("einops")
ids = torch.randint(0, 64, (1, 5))
cases = (
    (ids, {}, {"attn_data_dependent_alibi": True, "attn_num_mem_kv": 2}),
    (ids, {}, {"attn_use_latent_kv": True, "attn_dim_latent_kv": 8}),
    ([ids[0], ids[0, :3]], {"scaled_sinu_pos_emb": True}, {}),
    (ids, {}, {"attn_sparse_topk": 8}),
)
raised = 0
for prompts, outer, options in cases:
    layers = package.Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, **options)
    model = package.TransformerWrapper(num_tokens=64, max_seq_len=64, attn_layers=layers, **outer)
    try:
        package.AutoregressiveWrapper(model).generate(prompts, 4, temperature=0.0)
    except (IndexError, RuntimeError, TypeError, einops.EinopsError) as error:
        print(f"{', '.join({**outer, **options})}: {str(error).splitlines()[0][:60]}")
        raised += 1
print(f"generate raises with {raised} of 4 options")
sys.exit(raised > 0)

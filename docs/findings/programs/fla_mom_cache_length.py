# pip install flash-linear-attention==0.6.0
"""Caches: MomAttention counts as many tokens as its queries have channels (layers/mom.py:659), so
that generate cannot go on from a cache."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
import torch
from fla.layers import MomAttention
from fla.models.utils import Cache
from triton.runtime.autotuner import Autotuner

Autotuner._bench = lambda self, *args, **kwargs: [0.0]
torch.manual_seed(0)
layer = MomAttention(32, head_dim=16, num_heads=1, num_memories=3, layer_idx=0).eval()
cache = Cache()
with torch.no_grad():
    layer(torch.randn(1, 6, 32), past_key_values=cache, use_cache=True)
print(f"after 6 tokens, the cache says that it holds {cache.get_seq_length()}")
sys.exit(cache.get_seq_length() != 6)

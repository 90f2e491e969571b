# pip install flash-linear-attention==0.6.0
"""Packed rows: LinearAttentionForCausalLM does not give cu_seqlens to its layers, which take it
(models/linear_attn/modeling_linear_attn.py:309)."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
import torch
from fla.models import LinearAttentionConfig, LinearAttentionForCausalLM
from triton.runtime.autotuner import Autotuner

Autotuner._bench = lambda self, *args, **kwargs: [0.0]
torch.manual_seed(0)
config = LinearAttentionConfig(hidden_size=32, num_hidden_layers=1, num_heads=2, vocab_size=40)
config.initializer_range = 0.2
model = LinearAttentionForCausalLM(config).eval()
ids = torch.randint(40, (1, 20))
with torch.no_grad():
    packed = model(ids, cu_seqlens=torch.tensor([0, 8, 20])).logits
    alone = torch.cat([model(ids[:, :8]).logits, model(ids[:, 8:]).logits], 1)
error = ((packed - alone).abs().max() / alone.abs().max()).item()
print(f"two rows packed differ from each alone by {error:.1e}")
sys.exit(error > 1e-3)

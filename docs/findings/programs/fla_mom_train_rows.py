# pip install flash-linear-attention==0.6.0
"""Causality and batches: in training, MomAttention's convolutions take the memories of all rows
for one sequence (layers/mom.py:520)."""

import os
import sys
from functools import partialmethod
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"
import torch
from fla.layers import mom
from triton.runtime.autotuner import Autotuner

Autotuner._bench = lambda self, *args, **kwargs: [0.0]
mom.chunk_gated_delta_rule = mom.fused_recurrent_gated_delta_rule  # the interpreter runs this one
# fla_mom_order shows what an argsort that is not stable does.
stable = partialmethod(torch.Tensor.argsort, stable=True)
patch.object(torch.Tensor, "argsort", stable).start()
torch.manual_seed(0)
layer = mom.MomAttention(32, head_dim=16, num_heads=1, num_memories=3, layer_idx=0)
x, worst = torch.randn(2, 12, 32), 0.0
for mode in ("training", "evaluation"):
    layer.train(mode == "training")
    with torch.no_grad():
        batch, row = layer(x)[0], layer(x[:1])[0]
        changed = layer(torch.cat([x[:1, :-1], -x[:1, -1:]], 1))[0]
    scale = row.abs().max()
    others = ((batch[:1] - row).abs().max() / scale).item()
    early = ((changed - row)[:, :-1].abs().max() / scale).item()
    worst = max(worst, others, early)
    print(f"{mode}: another row moves outputs by {others:.1e}, the last token by {early:.1e}")
sys.exit(worst > 1e-3)

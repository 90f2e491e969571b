# pip install flash-linear-attention==0.6.0
"""Padding: for a step, MultiheadLatentAttention cuts its mask to window_size (layers/mla.py:197),
but not its keys, so that it attends to the first tokens. flash-attn's function is written out."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
import torch
from fla.layers import mla
from fla.models.utils import Cache
from triton.runtime.autotuner import Autotuner


def attend(q, k, v, window_size, **options):  # of one row
    shape, (q, k, v) = q.shape, (x.reshape(-1, *x.shape[-2:]).transpose(0, 1) for x in (q, k, v))
    keep = torch.ones(k.shape[1], k.shape[1]).tril().triu(-window_size[0])[-q.shape[1] :] > 0
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, keep)
    return y.transpose(0, 1).reshape(shape)


Autotuner._bench = lambda self, *args, **kwargs: [0.0]
mla.flash_attn_func = mla.flash_attn_varlen_func = attend
torch.manual_seed(0)
layer = mla.MultiheadLatentAttention(32, 2, window_size=4, layer_idx=0).eval()
x, mask, cache = torch.randn(1, 12, 32), torch.ones(1, 12, dtype=torch.long), Cache()
with torch.no_grad():
    y = layer(x, None)[0][:, 11:]
    layer(x[:, :11], None, past_key_values=cache, use_cache=True)
    step = layer(x[:, 11:], mask, past_key_values=cache, use_cache=True)[0]
error = ((step - y).abs().max() / y.abs().max()).item()
print(f"with a mask of ones, a step differs from forward by {error:.1e}")
sys.exit(error > 1e-3)

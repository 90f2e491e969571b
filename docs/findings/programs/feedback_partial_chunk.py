# pip install feedback-transformer-pytorch==0.0.11
"""Cut: FeedbackTransformer lets a token that is alone in the last chunk of seq_len tokens not see
itself (feedback_transformer_pytorch.py:156)."""

import sys
from importlib import import_module

import torch

transformer = import_module("feedback_transformer_pytorch").FeedbackTransformer
worst = 0.0
for seed in (0, 1):
    torch.manual_seed(seed)
    model = (
        transformer(num_tokens=64, dim=16, depth=1, mem_len=8, seq_len=2, heads=2, dim_head=8)
        .double()
        .eval()
    )
    ids = torch.randint(0, 64, (1, 8))
    with torch.no_grad():
        whole = model(ids)
        for t in range(2, 9):
            error = ((model(ids[:, :t]) - whole[:, :t]).abs().max() / whole.abs().max()).item()
            print(f"seed {seed}, first {t} of 8: {error:.1e}")
            worst = max(worst, error)
print(f"the first tokens alone, and within the whole, differ by {worst:.1e}")
sys.exit(worst > 1e-9)

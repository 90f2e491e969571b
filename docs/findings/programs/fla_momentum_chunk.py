# pip install flash-linear-attention==0.6.0
"""Forms: the chunked reference of the momentum delta rule subtracts running sums that agree to
rounding, and scales by exp(-sum of log_mu) (ops/momentum_delta_rule/naive.py:139, :149)."""

import sys
from importlib import import_module

import torch
from torch.nn.functional import normalize

naive = import_module("fla.ops.momentum_delta_rule.naive")
worst = 0.0
for log_mu in (-0.01, -0.1, -0.4):
    for seed in (0, 1):
        torch.manual_seed(seed)
        q, k, v, p = torch.randn(4, 1, 64, 2, 8)
        given = {"q": q, "k": normalize(k, dim=-1), "v": v, "p": normalize(p, dim=-1)}
        given |= {"beta": torch.rand(1, 64, 2), "eta": torch.rand(1, 64, 2)}
        given["log_alpha"] = -0.01 * torch.rand(1, 64, 2)
        given["log_mu"] = torch.full((1, 64, 2), log_mu)
        step = naive.recurrent_momentum_delta_rule_ref(**given)[0]
        chunk = naive.chunk_momentum_delta_rule_ref(**given)[0]
        error = ((chunk - step).abs().max() / step.abs().max()).item()
        print(f"log_mu {log_mu}, seed {seed}: {error:.1e}")
        worst = max(worst, error)
print(f"chunked and recurrent outputs differ by {worst:.1e}")
sys.exit(worst > 1e-2)

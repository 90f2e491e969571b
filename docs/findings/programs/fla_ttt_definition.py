# pip install flash-linear-attention==0.6.0
"""Forms: TTT's reference adds to its norm what the model returned (ops/ttt/naive.py:68), where the
paper (2407.04620) adds q, and steps at the rate of the token that reads (:60, :61), not writes."""

import sys
from importlib import import_module

import torch
from torch.nn.functional import layer_norm

reference = import_module("fla.ops.ttt.naive").chunk_ttt_linear_ref
size, difference = 4, 0.0
for case in ("one rate", "rates of tokens"):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 8, 1, 4)
    eta = 0.1 * (torch.ones(1, 8, 1, 1) if case == "one rate" else torch.rand(1, 8, 1, 1))
    reads, keys = (torch.cat([z[0], torch.ones(8, 1, 1)], -1) for z in (q, k))
    model = start = torch.eye(5, 4).requires_grad_()  # the last row is the bias
    outputs = []
    for i in range(8):
        start = start if i % size else model
        error = k[0, i] + layer_norm(keys[i] @ start, (4,), eps=1e-6) - v[0, i]
        model = model - eta[0, i] * torch.autograd.grad(error.square().sum() / 2, start)[0]
        outputs.append(reads[i] @ model)
    options = {"scale": 1.0, "mini_batch_size": size, "initial_state": torch.eye(4)[None, None]}
    found = reference(q.clone(), k, v, torch.ones(1, 4), torch.zeros(1, 4), eta, **options)[0]
    read = torch.stack(outputs)
    for added, z in (("what is read", read), ("q", q[0])):
        difference = (found[0] - layer_norm(read, (4,), eps=1e-6) - z).abs().max().item()
        print(f"{case}, the norm plus {added}: {difference:.1e}")
print(f"the reference and the paper's definition differ by {difference:.1e}")
sys.exit(difference > 1e-3)

"""Untrained models, planted products of two sides, and scores computed directly."""

import numpy as np
import torch

from analysis.base import Subject
from analysis.frequencies.rotation import RotatedSides
from lab.layers.attention import Attention
from lab.layers.ssd import SSD
from lab.models import build
from tasks.mqar import MQAR

TASK = MQAR(seq_len=16, vocab_size=32).replace(n_pairs=(2, 4))


CASES = {
    "attention": ("AM", {}),
    "shared keys": ("AM", {"A.n_kv_heads": 2}),
    "neighbouring channels": ("AM", {"A.rope_layout": "interleaved", "A.rope_base": 50.0}),
    "SSD": ("SM", {"S.d_state": 8}),
    "SSD in groups": ("SM", {"S.d_state": 8, "S.n_groups": 2}),
    "SSD in tiled groups": (
        "SM",
        {"S.d_state": 8, "S.n_groups": 2, "S.groups": "tiled", "S.rope_layout": "interleaved"},
    ),
    "IFA": ("IM", {}),
}


def build_subject(stack="AM SM", options=None, rows=3, double=True):
    """Return a subject that is not trained, in fp64: sums then agree to twelve digits."""
    model = build(stack, vocab_size=32, d_model=32, n_heads=4, options=options)
    batch = TASK.batch(split="test", size=rows)
    return Subject(TASK, (model.double() if double else model).eval(), batch)


def plant_product(product, theta, seq_len=16, rows=4):
    """Return a rotation of one comparison whose keys are ones and whose q̄k is `product` [m]."""
    k = torch.ones(rows, seq_len, 1, len(theta), dtype=torch.complex128)
    q = k * torch.as_tensor(product, dtype=torch.complex128).conj()
    return RotatedSides(0, "Q/K", q, k, np.asarray(theta), 1.0, np.zeros(1, np.int64), None)


def get_first_mixer(model) -> Attention | SSD:
    """Return the mixer of the first block."""
    mixer = model.blocks[0].mixer
    assert isinstance(mixer, Attention | SSD)
    return mixer


def score_directly(found, model, batch):
    """Return score [b h t s] and decay [b t h] from the rotated vectors that the layer computes."""
    mixer = get_first_mixer(model)
    _, cache = model.run_with_cache(batch.inputs)
    point = "blocks.0.mixer.hook_"
    attention = found.sides == "Q/K"
    q, k = (cache[point + n] for n in (("rot_q", "rot_k") if attention else ("C_rot", "B_rot")))
    b, t = batch.inputs.shape
    score = torch.zeros(b, mixer.n_heads, t, t, dtype=torch.float64)
    for h in range(mixer.n_heads):
        if isinstance(mixer, Attention):
            mine, theirs = h, h // (mixer.n_heads // mixer.n_kv_heads)
        elif mixer.groups == "tiled":
            mine = theirs = h % mixer.n_groups
        else:
            mine = theirs = h // (mixer.n_heads // mixer.n_groups)
        for i in range(t):
            for j in range(t):
                score[:, h, i, j] = (q[:, i, mine] * k[:, j, theirs]).sum(-1)
    scale = q.shape[-1] ** -0.5 if attention else 1.0
    log_decay = None if attention else cache[point + "log_decay"]
    return score * scale, log_decay

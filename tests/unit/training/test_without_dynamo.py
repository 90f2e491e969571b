"""Optimizers that do not import torch._dynamo: the same bits as torch's own."""

import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lab.training.without_dynamo import AdamW

TRAIN = """
import sys, lab
tiny = {"seq_len": 8, "vocab_size": 32, "d_model": 8, "batch_size": 4, "test_rows": 4}
lab.train("mqar", steps=2, **tiny)
sys.exit("torch._dynamo" in sys.modules)
"""


def train(kinds: Sequence[type[torch.optim.AdamW]], decay: float) -> list[Tensor]:
    """Train two parameters, each step with the next kind, which goes on from the others' state."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.randn(shape, generator=generator) for shape in ((3, 5), (4,))]
    for parameter in parameters:
        parameter.requires_grad_()
    groups = [{"params": [parameters[0]], "weight_decay": decay}, {"params": [parameters[1]]}]
    optimizers = [kind([dict(group) for group in groups], lr=0.1, fused=True) for kind in kinds]
    for step in range(9):
        optimizer = optimizers[step % len(kinds)]
        optimizer.load_state_dict(optimizers[(step - 1) % len(kinds)].state_dict())
        optimizer.zero_grad()
        torch.stack([(p.sin() * (step + 1)).sum() for p in parameters]).sum().backward()
        optimizer.step()
    return parameters


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adamw_is_torchs_bit_for_bit_and_takes_its_state(decay):
    torchs = train([torch.optim.AdamW], decay)
    for kinds in ([AdamW], [AdamW, torch.optim.AdamW]):
        for ours, other in zip(train(kinds, decay), torchs, strict=True):
            assert ours.equal(other)


def test_training_does_not_import_dynamo(tmp_path):
    done = subprocess.run([sys.executable, "-c", TRAIN], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr

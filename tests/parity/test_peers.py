"""The optional packages: which are installed, and what is said of one that is not."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from lab import peers

LATE = """
import torch
from lab import peers

models = peers.load("transformers.models.mamba2")
peers.load("mamba_ssm.ops.triton.ssd_combined")
mixer = models.Mamba2Model(models.Mamba2Config(
    vocab_size=8, hidden_size=8, num_heads=2, head_dim=8, state_size=4, num_hidden_layers=1,
    n_groups=1,
))
mixer(torch.zeros(1, 3, dtype=torch.long))
peers.load("mamba_ssm.modules.ssd_minimal")
"""

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


@pytest.mark.parametrize("package", peers.PEERS)
def test_the_version_recorded_is_the_one_installed(package):
    """The numbers and disagreements recorded in these tests are those versions'."""
    pins = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines() if "==" in line)
    recorded = {name.lower().replace("_", "-"): pin for name, pin in pins.items()}
    assert peers.version(package) == recorded[peers.PEERS[package].lower()]


def test_a_package_that_is_not_installed(monkeypatch):
    find = importlib.util.find_spec
    absent = lambda name: None if name == "fla" else find(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", absent)
    for ask in (peers.load, peers.version):
        with pytest.raises(ValueError, match=r"is not installed: `pip install flash-linear-att"):
            ask("fla")
    assert peers.explain_missing("triton") is None


def test_a_package_that_nobody_knows():
    with pytest.raises(ValueError, match="package='flash_attn': must be one of mamba_ssm, fla, "):
        peers.load("flash_attn.bert")


def test_a_model_named_late_finds_no_kernels():
    """transformers imports a model when it is first named: one that then found the package that
    stands in for mamba_ssm would call its kernels on a CPU."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", LATE], check=True)

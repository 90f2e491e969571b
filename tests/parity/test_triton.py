"""The kernels of mamba-ssm and fla: where they run, what they refuse, and what they compute."""

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.ops.ssd import BACKENDS, resolve_backend, ssd
from lab.ops.ssd_forms import ssd_recurrent

KERNELS = ["mamba_ssm", "fla"]
INTERPRETED = Path(__file__).with_name("interpreted.py")


@pytest.mark.parametrize(
    "chosen", ["not thorough", pytest.param("thorough", marks=pytest.mark.thorough)]
)
def test_kernels_in_the_interpreter(chosen, tmp_path):
    """The tests in `interpreted.py`; their process's environment lets Triton interpret.

    mamba-ssm's gradients are summed as on a GPU by default, by atomic additions.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1", "MAMBA_DETERMINISTIC": "0"}
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    report = tmp_path / "report.xml"
    done = subprocess.run(
        [*pytest_command, str(INTERPRETED), "-m", chosen, f"--junitxml={report}"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cases = list(ET.parse(report).iter("testcase"))
    # What is expected to fail is reported as skipped, with a type of its own.
    skips = [skip.get("type") for case in cases for skip in case.iter("skipped")]
    assert set(skips) <= {"pytest.xfail"}, done.stdout
    passed = [case.get("name", "") for case in cases if case.find("skipped") is None]
    assert all(any(backend in name for name in passed) for backend in KERNELS), done.stdout


@pytest.mark.parametrize("backend", KERNELS)
def test_kernels_on_a_cpu_say_what_they_need(backend, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=f"backend='{backend}'.* needs CUDA"):
        resolve_backend(backend, torch.device("cpu"))


@pytest.mark.parametrize(
    ("major", "triton", "refused"),
    [(9, "3.6.0", True), (9, "3.7.1", False), (9, "3.3.1", False), (8, "3.6.0", False)],
)
def test_fla_is_refused_where_it_refuses_gradients(monkeypatch, major, triton, refused):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr("lab.peers.version", lambda package: triton)
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda n: None if n == "tilelang" else find(n))
    cuda = torch.device("cuda")
    assert resolve_backend("mamba_ssm", cuda) == "mamba_ssm"
    if refused:
        with pytest.raises(ValueError, match=r"cannot run on cuda: .*and this is 3\.6\.0: use"):
            resolve_backend("fla", cuda)
        with torch.no_grad():
            assert resolve_backend("fla", cuda) == "fla"
    else:
        assert resolve_backend("fla", cuda) == "fla"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", KERNELS)
def test_kernels_on_cuda(backend):
    generator = torch.Generator().manual_seed(0)
    b, t, h, p, g, n = 2, 300, 4, 64, 2, 128
    x, B, C = (torch.randn(b, t, *s, generator=generator) for s in ((h, p), (g, n), (g, n)))
    dt = torch.rand(b, t, h, generator=generator)
    A, D = -torch.rand(h, generator=generator), torch.randn(h, generator=generator)
    state = torch.randn(b, h, p, n, generator=generator)
    inputs: list[Any] = [z.cuda().requires_grad_() for z in (x, dt, A, B, C, D, state)]
    exact = [z.detach().double().requires_grad_() for z in inputs]
    if backend == "fla" and BACKENDS[backend].missing(torch.device("cuda")) is not None:
        with torch.no_grad():  # what is refused is gradients alone
            actual = ssd(*inputs[:6], initial_state=inputs[6], backend=backend)
            for ours, theirs in zip(actual, ssd_recurrent(*exact), strict=True):
                assert_near(ours, theirs)
        return
    actual = ssd(*inputs[:6], initial_state=inputs[6], backend=backend)
    expected = ssd_recurrent(*exact)
    gradients = [
        torch.autograd.grad(y.square().sum() + state.square().sum(), list(tensors))
        for (y, state), tensors in ((actual, inputs), (expected, exact))
    ]
    for ours, theirs in zip((*actual, *gradients[0]), (*expected, *gradients[1]), strict=True):
        assert_near(ours, theirs)


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    # TF32 keeps 10 bits of each factor; a few products follow one another.
    bound = 8 * 2**-10 * theirs.abs().max().item()
    assert (ours.double() - theirs).abs().max().item() <= bound

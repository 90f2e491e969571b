"""Triton's kernels on a CPU, in its interpreter: `test_triton.py` runs these in processes of their
own, because the environment has to say TRITON_INTERPRET=1 before Triton is imported."""

import builtins
import contextlib
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lab import peers
from lab.layers.ssd import SSD
from lab.ops.ssd import BACKENDS, ssd
from lab.ops.ssd_forms import ssd_recurrent

CHUNK = 16
"""The shortest chunk that the kernels take."""

# Rounding to fp32 (2⁻²⁴) or fp16 (2⁻¹¹) at each of the few hundred additions behind a number, of
# random sign: some tens of roundings, relative to the largest number in the tensor.
TOLERANCE = {torch.float32: 32 * 2**-24, torch.float16: 16 * 2**-11, torch.bfloat16: 16 * 2**-8}


class LoopIndex(int):
    """What a loop's counter is in a compiled kernel: it can be cast. In the interpreter it is an
    int, and fla's kernels cast theirs to int64."""

    def to(self, dtype):
        return self


@pytest.fixture(params=["mamba_ssm", "fla"])
def backend(request, monkeypatch):
    if request.param == "fla":
        kernels = peers.load("fla.ops.common.chunk_h")
        monkeypatch.setattr(kernels, "range", counted, raising=False)
    return request.param


@pytest.fixture(scope="module", autouse=True)
def _interpreter():
    """Stand in for what the kernels' launchers ask of a GPU: nothing of it bears on numbers.

    The autotuner would time each configuration of a kernel on a GPU: here it takes the first. The
    launchers make x's GPU the current one, and count its processors to size what they reserve.
    """
    assert os.environ["TRITON_INTERPRET"] == "1"
    with pytest.MonkeyPatch.context() as patch:
        autotuner = peers.load("triton.runtime.autotuner").Autotuner
        patch.setattr(autotuner, "_bench", lambda self, *args, **kwargs: [0.0])
        patch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
        properties = SimpleNamespace(multi_processor_count=1)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        for name in ("mamba_ssm", "fla"):
            patch.setitem(BACKENDS, name, BACKENDS[name]._replace(missing=lambda device: None))
        yield


def counted(*bounds):
    return map(LoopIndex, builtins.range(*(int(bound) for bound in bounds)))


def problem(t: int, g: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Heads, widths and states that fill no tile; states that outlive a chunk."""
    b, h, p, n = 1, 4, 12, 20
    generator = torch.Generator().manual_seed(t + g)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {
        "x": normal(b, t, h, p).to(dtype),
        "dt": normal(b, t, h).sigmoid(),
        "A": -normal(h).sigmoid() / 2,
        "B": normal(b, t, g, n).to(dtype),
        "C": normal(b, t, g, n).to(dtype),
        "D": normal(h),
        "initial_state": normal(b, h, p, n),
    }
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def loss(y: Tensor, state: Tensor) -> Tensor:
    """A weight of its own for each number of y and of the state."""
    generator = torch.Generator().manual_seed(0)
    weights = (torch.randn(z.shape, generator=generator) for z in (y, state))
    return sum(((z * w).sum() for z, w in zip((y, state), weights, strict=True)), torch.zeros(()))


def assert_near(actual: Tensor, exact: Tensor, name: str, tolerance: float) -> None:
    bound = tolerance * exact.abs().max().item()
    deviation = (actual.double() - exact).abs().max().item()
    assert deviation <= bound, f"{name} deviates by {deviation:.1e}, bound {bound:.1e}"


NO_DOT = pytest.mark.xfail(
    strict=True, reason="Triton's interpreter stores bf16 as integers, and tl.dot multiplies those"
)


@pytest.mark.parametrize(
    ("t", "g", "without", "dtype"),
    [
        pytest.param(2 * CHUNK + 5, 2, (), torch.float32, id="chunks and a part, groups, state"),
        pytest.param(
            *(CHUNK, 4, ("initial_state",), torch.float32),
            id="a chunk, a group a head",
            marks=pytest.mark.thorough,
        ),
        pytest.param(CHUNK - 3, 1, ("D",), torch.float32, id="less than a chunk, no skip"),
        pytest.param(CHUNK - 3, 2, (), torch.float16, id="fp16"),
        pytest.param(CHUNK - 3, 2, (), torch.bfloat16, id="bf16", marks=NO_DOT),
    ],
)
def test_backend_gives_the_recurrence(backend, t, g, without, dtype):
    inputs = {name: z for name, z in problem(t, g, dtype).items() if name not in without}
    exact = {name: z.detach().double().requires_grad_() for name, z in inputs.items()}
    y, state = ssd(**inputs, chunk_len=CHUNK, backend=backend)
    assert (y.dtype, state.dtype) == (dtype, torch.float32)
    expected = ssd_recurrent(**exact)
    for name, ours, theirs in zip(("y", "state"), (y, state), expected, strict=True):
        assert_near(ours, theirs, name, TOLERANCE[dtype])
    gradients = torch.autograd.grad(loss(y, state), list(inputs.values()))
    expected = torch.autograd.grad(loss(*expected), list(exact.values()))
    for name, ours, theirs in zip(inputs, gradients, expected, strict=True):
        assert_near(ours, theirs, f"gradient to {name}", TOLERANCE[dtype])


@pytest.mark.thorough
def test_backend_is_causal_across_chunks(backend):
    inputs = problem(CHUNK + 3, 2)
    y, _ = ssd(**inputs, chunk_len=CHUNK, backend=backend)
    for cut in (CHUNK - 1, CHUNK):
        other = {n: z.detach().clone() for n, z in inputs.items()}
        for name in ("x", "dt", "B", "C"):
            other[name][:, cut:] *= 2
        assert torch.equal(y[:, :cut], ssd(**other, chunk_len=CHUNK, backend=backend)[0][:, :cut])
    for gradient in torch.autograd.grad(
        y[:, CHUNK - 1].sum(), [inputs[n] for n in ("x", "dt", "B")]
    ):
        assert gradient[:, :CHUNK].any()
        assert not gradient[:, CHUNK:].any()


def test_backend_goes_on_from_its_state(backend):
    """A chunk_len that the kernels do not take is rounded to one that they do."""
    inputs = problem(2 * CHUNK + 3, 2)
    state, parts = inputs["initial_state"], []
    for span in (slice(None, CHUNK + 5), slice(CHUNK + 5, None)):
        x, dt, B, C = (inputs[name][:, span] for name in ("x", "dt", "B", "C"))
        y, state = ssd(x, dt, inputs["A"], B, C, inputs["D"], CHUNK + 7, state, backend)
        parts.append(y)
    expected, last = ssd_recurrent(**{name: z.double() for name, z in inputs.items()})
    assert_near(torch.cat(parts, 1), expected, "y", TOLERANCE[torch.float32])
    assert_near(state, last, "state", TOLERANCE[torch.float32])


def test_layer_on_backend(backend):
    """Padding has dt = 0, and a first token by itself is a chunk of one."""
    b, t, d = 2, CHUNK + 3, 8
    x = torch.randn(b, t, d, generator=torch.Generator().manual_seed(0))
    keep = torch.arange(t) >= torch.tensor([[0], [4]])
    layers = []
    for name in (backend, "torch"):
        torch.manual_seed(0)
        layers.append(SSD(d, 2, d_state=6, chunk_len=CHUNK, position="none", backend=name))
    for tokens, mask in ((x, keep), (x[:, :1], None)):
        (y, state), (expected, last) = (layer.prefill(tokens, keep=mask) for layer in layers)
        kept = mask if mask is not None else slice(None)
        assert_near(y[kept], expected[kept].double(), "y", TOLERANCE[torch.float32])
        assert_near(state.ssm, last.ssm.double(), "state", TOLERANCE[torch.float32])


def test_backend_refuses_fp64(backend):
    inputs = {name: z.double() for name, z in problem(CHUNK, 1).items()}
    with pytest.raises(ValueError, match=f"backend='{backend}' computes in fp32, not in fp64"):
        ssd(**inputs, backend=backend)

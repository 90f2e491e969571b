"""The laws on small modules, verdict by verdict; `test_calibration` has most planted faults."""

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.laws import CONDITIONS, LAWS, Condition, Verdict, certify
from tests.planted.right import RightGRU, TorchAttention
from tests.planted.scans import Convolution


def judge(
    module: nn.Module | Callable[[Tensor], Tensor],
    lengths: tuple[int, ...] = (1, 2, 5, 16),
    conditions: tuple[Condition, ...] = CONDITIONS[:1],
    d_model: int | None = 8,
) -> dict[str, Verdict]:
    found = certify(
        module,
        d_model=d_model,
        lengths=lengths,
        conditions=conditions,
        max_len=1024,
        rounding_len=128,
        seconds=60.0,
    )
    return {v.law: v for v in found}


class Mixing(nn.Module):
    """A module made of a function, with a weight for the gradient to reach."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def use_single(x: Tensor) -> Tensor:
    """Rounds to fp32 on the way, as many a normalisation does."""
    return (x.float().cumsum(1).sin() / 3).to(x.dtype)


@pytest.mark.parametrize(
    "build",
    [
        TorchAttention,
        RightGRU,
        Convolution,
        lambda: Mixing(use_single),
        lambda: Mixing(torch.tanh),
    ],
    ids=["torch attention", "gru", "convolution", "fp32 inside", "pointwise"],
)
def test_right_modules_pass(build: Callable[[], nn.Module]):
    asked = dict.fromkeys(LAWS, "holds") | {
        "matrix applies": "not applicable",
        "prefill = step": "not applicable",
        "relative": "not applicable",
        "padding": "not applicable",
        "documents do not mix": "not applicable",
        "forms agree": "not decided",
    }
    torch.manual_seed(0)
    for law, v in judge(build(), d_model=None).items():
        coarse = "not compute in fp64" in v.evidence
        refuses = "_flash_attention_for_cpu_backward is not implemented" in v.evidence
        expected = "not decided" if coarse else "not applicable" if refuses else asked[law]
        assert v.verdict == expected, v


def off_by_one(x: Tensor) -> Tensor:
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(1)
    return F.scaled_dot_product_attention(x, x, x, attn_mask=seen)


def leaks_by_gradient(x: Tensor) -> Tensor:
    future = x.mean(dim=1, keepdim=True)
    return x + (future - future.detach())


def leaks_by_gradient_of_the_next(x: Tensor) -> Tensor:
    following = F.pad(x[:, 1:], (0, 0, 0, 1))
    return x + (following - following.detach())


def leaks_when_large(x: Tensor) -> Tensor:
    """Looks ahead only for what no ordinary input holds."""
    return x + (x.abs().amax(dim=(1, 2), keepdim=True) > 4)


def leaks_beside_single(x: Tensor) -> Tensor:
    """A small part in fp32 is noise, but less than the leak."""
    return x + 1e-3 * x.float().tanh().to(x.dtype) + 1e-6 * x.mean(dim=1, keepdim=True)


def spreads_nan(x: Tensor) -> Tensor:
    """A value that no ordinary input holds makes the whole row not a number."""
    return x.masked_fill((x.abs() > 4).any(dim=(1, 2), keepdim=True), torch.nan)


@pytest.mark.parametrize(
    ("law", "fault"),
    [
        ("causal", lambda x: x + 1e-6 * x.mean(dim=1, keepdim=True)),
        ("causal", leaks_by_gradient),
        ("causal", leaks_by_gradient_of_the_next),
        ("causal", leaks_when_large),
        ("causal", leaks_beside_single),
        ("causal", spreads_nan),
        ("stable", lambda x: x / (x - x)),
    ],
    ids=[
        "small leak",
        "gradient only",
        "gradient of the next only",
        "large values only",
        "beside fp32",
        "nan of large values",
        "nan",
    ],
)
def test_planted_faults_are_found(law: str, fault: Callable[[Tensor], Tensor]):
    found = judge(Mixing(fault))
    assert found[law].verdict == "fails", found
    assert found[law].counterexample


def test_counterexample_is_the_shortest():
    found = judge(Mixing(off_by_one), lengths=(7, 1, 3))["causal"]
    assert found.counterexample == "length 2: changing position 1 moves output 0 of row 0"


def test_noise_is_not_called_a_leak():
    found = judge(Mixing(lambda x: x * random.random()))
    assert found["causal"].verdict == "not decided"
    assert found["causal"].evidence.startswith("length 1: a second call moves the output by ")


@pytest.mark.parametrize(("rate", "verdict"), [(3e5, "holds"), (1e6, "not decided")])
def test_rounding_may_move_an_output_by_a_hundredth_of_it_and_no_more(rate: float, verdict: str):
    assert judge(Mixing(lambda x: torch.sin(rate * x)))["causal"].verdict == verdict


def test_random_numbers_are_held_by_a_seed():
    found = judge(Mixing(lambda x: F.dropout(x, 0.1) + 1e-3 * x.mean(1, keepdim=True)))
    assert found["deterministic"].verdict == "fails"
    assert found["causal"].verdict == "fails"
    assert judge(Mixing(lambda x: F.dropout(x, 0.1)))["causal"].verdict == "holds"


def test_certify_leaves_the_module_as_it_was():
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.mT).mT

    module = Normalised()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    training = judge(module, (2, 5), CONDITIONS)["batch-invariant"]
    assert training.verdict == "fails"
    assert training.counterexample is not None
    assert training.counterexample.endswith("(seed 3, weights moved, training)")
    assert judge(module.eval(), (2, 5), CONDITIONS)["batch-invariant"].verdict == "holds"
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name
        assert tensor.dtype == before[name].dtype, name


@pytest.mark.parametrize(
    "options", [{"lengths": ()}, {"lengths": (0, 2)}, {"batch": 0}, {"max_len": 0}]
)
def test_empty_probes_are_refused(options: dict):
    with pytest.raises(ValueError, match="at least 1"):
        certify(nn.Linear(8, 8), d_model=8, **options)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_no_time_is_refused(seconds: float):
    with pytest.raises(ValueError, match=f"seconds={seconds} must be above 0"):
        certify(nn.Linear(8, 8), d_model=8, seconds=seconds)


@pytest.mark.parametrize(
    ("function", "outcome"),
    [
        (lambda x: x.cumsum(1) / 3, "holds"),
        (lambda x: x + x.mean(dim=1, keepdim=True), "fails"),
        (Mixing(off_by_one).forward, "fails"),
    ],
    ids=["running sum", "mean of all", "method"],
)
def test_functions_are_tried(function: Callable[[Tensor], Tensor], outcome: str):
    found = judge(function)
    assert list(found) == list(LAWS)
    assert found["causal"].verdict == outcome
    assert found["batch-invariant"].verdict == "holds"
    for law in ("gradient reach", "table reach", "prefill = step", "matrix applies"):
        assert found[law].verdict == "not applicable"


@pytest.mark.parametrize("law", ["causal", "batch-invariant"])
def test_however_little_time_there_is_several_lengths_are_tried(law: str):
    def mix(x: Tensor) -> Tensor:
        return x - x.mean((0, 1), keepdim=True)

    (found,) = [v for v in certify(mix, d_model=4, seconds=1e-9) if v.law == law]
    assert found.verdict == "fails"

"""The laws of precision, stability, repetition and forms on small modules, number by number.

`test_calibration` has most planted faults of these laws.
"""

from collections.abc import Callable
from itertools import count
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lab.laws import (
    CONDITIONS,
    LAWS,
    CertifySettings,
    Probes,
    Verdict,
    certify,
    in_double,
    numerics,
)
from lab.laws.probes import draw
from lab.layers.attention import Attention
from lab.layers.ssd import SSD
from tests.cases import CASES


def judge(
    law: str,
    module: nn.Module,
    *,
    max_len: int = 2048,
    rounding_len: int = 512,
    seconds: float = 60.0,
) -> Verdict:
    settings = CertifySettings(
        8,
        (1, 2, 5, 16),
        max_len=max_len,
        rounding_len=rounding_len,
        seconds=seconds,
    )
    return LAWS[law].judge(module.double(), Probes(settings))


class Mixing(nn.Module):
    """A module made of a function, behind a weight."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def iterate_logistic_map(x: Tensor) -> Tensor:
    """Doubles a difference in each of 60 rounds."""
    y = x.sigmoid()
    for _ in range(60):
        y = 4 * y * (1 - y)
    return y


def test_nothing_is_said_where_rounding_alone_moves_the_whole_output():
    found = judge("precision", Mixing(iterate_logistic_map))
    assert found.verdict == "not decided"
    assert found.evidence.startswith("in float32, rounding alone may move half of the outputs by ")


def use_cos_and_sin(angles: Tensor) -> Tensor:
    return torch.complex(angles.cos(), angles.sin())


def use_cos_and_sin_in_place(angles: Tensor) -> Tensor:
    return torch.complex(angles.clone().cos_(), angles.clone().sin_())


def use_polar(angles: Tensor) -> Tensor:
    return torch.polar(torch.ones_like(angles), angles)


def use_exponential(angles: Tensor) -> Tensor:
    return torch.complex(torch.zeros_like(angles), angles).exp()


def use_exponential_in_place(angles: Tensor) -> Tensor:
    return torch.complex(torch.zeros_like(angles), angles).exp_()


@pytest.mark.parametrize(
    "rotation",
    [
        use_cos_and_sin,
        use_cos_and_sin_in_place,
        use_polar,
        use_exponential,
        use_exponential_in_place,
    ],
)
def test_angles_in_fp32_are_allowed_however_they_turn(rotation: Callable[[Tensor], Tensor]):
    def turn(x: Tensor) -> Tensor:
        kind = torch.promote_types(x.dtype, torch.float32)
        rates = torch.tensor([1.0, 0.3, 0.05, 0.02], dtype=kind)
        turned = rotation(torch.arange(x.shape[1]).to(kind)[:, None] * rates)
        pairs = torch.view_as_complex(x.to(kind).unflatten(-1, (4, 2)))
        return torch.view_as_real(pairs * turned).flatten(-2).to(x.dtype)

    found = judge("precision", Mixing(turn), rounding_len=8192)
    assert found.verdict == "holds", found


class Sum(NamedTuple):
    total: Tensor
    position: Tensor


class Recurrence(nn.Module):
    """total ← rate · total + x."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return self.prefill(x)[0]

    def start(self, batch: int, position: int = 0) -> Sum:
        return Sum(torch.zeros(batch, 8).double(), torch.full((batch,), position))

    def prefill(
        self, x: Tensor, state: Sum | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Sum]:
        total, position = self.start(len(x)) if state is None else state
        outputs = []
        for token in x.unbind(1):
            total = self.rate * total + token
            outputs.append(total)
        return torch.stack(outputs, 1), Sum(total, position + x.shape[1])

    def step(self, x: Tensor, state: Sum) -> tuple[Tensor, Sum]:
        y, state = self.prefill(x[:, None], state)
        return y[:, 0], state


@pytest.mark.parametrize(
    ("module", "outcome"),
    [
        (Recurrence(0.9), "holds"),
        (Recurrence(1.0), "not decided"),
        (Recurrence(-1.01), "fails"),
        (Recurrence(2.0), "fails"),
        (Mixing(lambda x: x / (x - x.roll(300, 1))), "fails"),
    ],
    ids=["decay", "no decay", "alternating", "overflow", "not finite"],
)
def test_growth_is_found(module: nn.Module, outcome: str):
    found = judge("stable", module)
    assert found.verdict == outcome, found
    assert bool(found.counterexample) == (outcome == "fails")


class Turning(Recurrence):
    """A complex total that turns, of which the output is what a bounded function leaves."""

    def prefill(
        self, x: Tensor, state: Sum | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Sum]:
        total, position = self.start(len(x)) if state is None else state
        outputs = []
        for token in x.unbind(1):
            total = 1j * self.rate * total + token
            outputs.append(total.real.tanh())
        return torch.stack(outputs, 1), Sum(total, position + x.shape[1])


def test_a_complex_state_is_measured():
    assert judge("stable", Turning(0.9)).verdict == "holds"
    grown = judge("stable", Turning(1.003))
    assert (grown.verdict, "state 1.0 " in grown.evidence) == ("fails", False), grown
    overflown = judge("stable", Turning(3.0))
    assert overflown.evidence == "output 1, state inf"
    assert "sizes of the state" in (overflown.snippet or "")


def test_a_module_without_a_state_is_not_said_to_have_one():
    assert judge("stable", Mixing(lambda x: x / (x - x))).evidence == "output inf"


@pytest.mark.parametrize("options", [{}, {"position": "conv", "gate": "norm"}])
def test_the_constant_state_is_stable_to_64k(options: dict):
    torch.manual_seed(0)
    found = judge("stable", SSD(8, 2, d_state=4, **options), max_len=65_536)
    assert found.verdict == "holds"
    assert found.evidence.startswith("after 65536 tokens")


def test_one_pass_is_read_whatever_the_time():
    found = judge("stable", Mixing(torch.tanh), seconds=1e-9)
    assert found.verdict == "holds"
    assert found.evidence.startswith("after 256 tokens")


def test_attention_is_stable_for_the_time_given(monkeypatch):
    # A clock that moves by a second when looked at: after block 6 of 32.
    monkeypatch.setattr(numerics, "read_clock", count().__next__)
    found = judge("stable", Attention(8), max_len=8192, seconds=5.5)
    assert found.verdict == "holds"
    assert found.evidence.startswith("after 1536 tokens")
    assert "the time for 8192 tokens" in found.evidence


@pytest.mark.filterwarnings("ignore")  # PyTorch 2.13's compiler warns of what it does itself
@pytest.mark.usefixtures("unchecked")  # the compiler cannot trace the tests' type checker
@pytest.mark.parametrize(
    "name",
    [
        "attention soft mask",
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("ssd one chunk", "cdmoe gather", "routed")
        ),
    ],
)
def test_compiled_layers_agree_with_eager_ones(name):
    (case,) = (case for case in CASES if case.name == name)
    module, dtype = in_double(case.make(), draw((2, 16, case.d_model), seed=0))
    settings = CertifySettings(case.d_model, (16,), 2, compiler="aot_eager")
    found = LAWS["forms agree"].judge(module, Probes(settings, dtype))
    assert found.verdict == "holds", found.evidence


def test_nothing_is_compiled_unasked():
    assert judge("forms agree", Mixing(torch.tanh)).verdict == "not decided"


class UncompiledError(Exception):
    """What a compiler of kernels raises: an error of a class of its own."""


class Kernel(nn.Module):
    """Runs in fp32 only."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise UncompiledError
        return (self.weight * x).cumsum(1)


def test_a_kernel_that_does_not_compile_for_fp64_is_tried_in_fp32():
    found = certify(
        Kernel(), d_model=16, lengths=(2, 7), only=["causal"], conditions=CONDITIONS[:1]
    )[0]
    assert found.verdict == "holds", found.evidence
    assert found.evidence.endswith("in float32")


@pytest.mark.parametrize("error", [ValueError, UncompiledError])
def test_what_a_module_refuses_may_be_of_any_class(error):
    class Short(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] > (20 if x.dtype == torch.float32 else 40):
                raise error
            return x.cumsum(1)

    precision, bounded = certify(Short(), d_model=16, lengths=(2, 7), only=["precision", "stable"])
    assert precision.evidence == f"the module does not run in float32: raised {error.__name__}"
    assert bounded.evidence.startswith("after 32 tokens output is 2.74 times")


def test_a_saturated_output_is_as_precise_as_its_own_rounding():
    saturated = nn.Sequential(nn.Linear(8, 8), Mixing(lambda y: (100 * y.cumsum(1)).tanh()))
    assert judge("precision", saturated).verdict == "holds"

"""The lengths that laws go on to: by cost, whatever else the machine does."""

from typing import Any

import pytest
import torch
from torch import nn

from lab.laws import Certification, CertifySettings, law
from lab.laws.law import Timer
from tests.planted import FAULTS, RIGHT

DERIVATIVE = "gradient is the derivative"


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return next(one for one in (*FAULTS, *RIGHT) if one.name == name).build()


def test_the_gradient_is_judged_at_long_lengths_too_where_no_other_is_asked_for():
    found = Certification(nn.Linear(4, 4), CertifySettings(4, (66,))).judge(DERIVATIVE)
    assert (found.verdict, "lengths 66;" in found.evidence) == ("holds", True)


def test_a_backward_pass_that_works_in_chunks_is_judged_past_them():
    settings = CertifySettings(16, (2,), longer=(65,))
    found = Certification(build("backward loses the borders of chunks"), settings).judge(DERIVATIVE)
    assert found.verdict == "fails"
    assert (found.counterexample or "").startswith("length 65: the gradient differs")
    assert "_FirstOfChunk.backward is wrong" in (found.counterexample or "")


@pytest.mark.parametrize(
    ("module", "outcome", "lengths"),
    [
        ("straight-through", "not decided", ""),
        ("convolution", "holds", "lengths 2, 65, 130;"),
    ],
)
def test_longer_derivatives_of_right_modules_are_no_fault(module, outcome, lengths):
    settings = CertifySettings(16, (2,), longer=(65, 130))
    found = Certification(build(module), settings).judge(DERIVATIVE)
    assert (found.verdict, lengths in found.evidence) == (outcome, True)


def test_what_only_longer_inputs_bend_too_much_is_no_fault():
    class Bending(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * (1e8 if x.shape[1] > 64 else 1)).sin()

    found = Certification(Bending(), CertifySettings(16, (2,), longer=(33, 65))).judge(DERIVATIVE)
    assert (found.verdict, "lengths 2, 33;" in found.evidence) == ("holds", True)


def test_common_lengths_are_reached_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, 0.3, 0.3, 0.8])
    monkeypatch.setattr(law, "read_clock", lambda: next(clock))
    timer = Timer(5.0)
    assert timer.allows(128)
    assert timer.allows(257)  # a quarter of the time for longer lengths would not be enough
    assert timer.allows(513)
    assert not timer.allows(1025)


class OddError(Exception):
    """Of a class of the module's own."""


class WrongFromAfar(torch.autograd.Function):
    """Doubles; its backward refuses odd lengths beyond 200 tokens, and is wrong at even ones."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        if grads[0].shape[1] > 200 and grads[0].shape[1] % 2:
            raise OddError
        return grads[0] * (3 if grads[0].shape[1] > 200 else 2)


def test_lengths_after_a_refused_one_are_tried():
    class Doubling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = WrongFromAfar.apply(x)
            assert isinstance(y, torch.Tensor)
            return y

    settings = CertifySettings(16, (2,), longer=(201, 256))
    found = Certification(Doubling(), settings).judge(DERIVATIVE)
    assert found.verdict == "fails"
    assert "WrongFromAfar.backward is wrong" in (found.counterexample or "")


@pytest.mark.parametrize("refused", [lambda rows: rows == 1, lambda rows: rows > 3])
def test_a_leak_is_found_though_rows_that_help_to_search_are_refused(refused):
    class Leaking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            late = x.shape[1] > 30
            if late and refused(len(x)):
                raise OddError
            return x.cumsum(1) + late * x.mean(1, keepdim=True)

    found = Certification(Leaking(), CertifySettings(16, (2, 33))).judge("causal")
    assert found.verdict == "fails"


def test_a_refused_trial_hides_no_smaller_failure():
    class Leaking(nn.Module):
        """Refuses large inputs; only its gradient leaks, which is tried after them."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.abs().max() > 6:
                raise OddError
            ahead = x.mean(1, keepdim=True)
            return x + ahead - ahead.detach()

    found = Certification(Leaking(), CertifySettings(16, (16,))).judge("causal")
    assert (found.counterexample or "").startswith("length 2:")

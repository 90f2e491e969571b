"""The law of gradients: what cuts a parameter is named, and right modules hold."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lab.laws.probes import draw
from tests.unit.laws.planted_gradients import Planted, StraightThrough, judge, rank


class ForgetsOne(torch.autograd.Function):
    """A product whose gradient for the second factor was forgotten."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a * b + 0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        return grads[0], None


class SilencesOne(ForgetsOne):
    """One whose gradient for the second factor is zero."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        return grads[0], torch.zeros(8, dtype=grads[0].dtype)


class HidesOne(torch.autograd.Function):
    """A function of one argument that reads a parameter beside it."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, beside: list[Tensor]) -> Tensor:
        return a * beside[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def multiply_without_grad(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        weight = m.p * 2
    return h * weight


def assign(m: Any, h: Tensor) -> Tensor:
    buffer = torch.zeros_like(h)
    buffer[..., :] = m.p.detach()
    return h + buffer


NONE = {
    "cut by Tensor.detach": lambda m, h: h * m.p.detach(),
    "cut by Tensor.data": lambda m, h: h * m.p.data,
    "cut by Tensor.detach ": assign,
    "cut by no_grad around Tensor.mul": multiply_without_grad,
    "cut by Tensor.item": lambda m, h: h * m.p.sum().item(),
    "cut by Tensor.argmax": lambda m, h: h * (h * m.p).argmax(-1, keepdim=True),
    "cut by Tensor.topk": lambda m, h: h * (h * m.p).topk(1).indices,
    "cut by Tensor.long": lambda m, h: h * (h * m.p).round().long(),
    "cut by Tensor.gt": lambda m, h: h * (m.p > h),
    "cut by ForgetsOne, an autograd.Function, around Tensor.mul": lambda m, h: ForgetsOne.apply(
        h, m.p
    ),
    "cut by HidesOne, an autograd.Function, around Tensor.mul": lambda m, h: HidesOne.apply(
        h, [m.p]
    ),
    "cut by Tensor.detach  ": lambda m, h: checkpoint(
        lambda z: z * m.p.detach(), h, use_reentrant=False
    ),
    "used": lambda m, h: (h * m.p, h)[1],
    "never used": lambda m, h: h,
}

ZERO = {
    "lost in Tensor.round": lambda m, h: h + m.p.round(),
    "lost in Tensor.sign": lambda m, h: h + m.p.sign() * 2,
    "lost in Tensor.clamp": lambda m, h: h * m.p.clamp(7, 8),
    "lost in F.relu": lambda m, h: h + F.relu(m.p - 9),
    "lost in Tensor.round ": lambda m, h: StraightThrough.apply(m.p.round() + h),
    "lost in SilencesOne, an autograd.Function, around Tensor.add": lambda m, h: SilencesOne.apply(
        h, m.p
    ),
    "lost between Tensor.mul and Tensor.sub": lambda m, h: h + m.p * 1 - m.p,
    "multiplied by zero in Tensor.mul": lambda m, h: h + 0 * m.p,
    "multiplied by zero in Tensor.mul ": lambda m, h: h + m.p * torch.zeros(8, dtype=h.dtype),
}


@pytest.mark.parametrize(
    ("how", "words", "function"),
    [("none", *case) for case in NONE.items()] + [("zero", *case) for case in ZERO.items()],
    ids=[*NONE, *ZERO],
)
def test_what_cuts_a_parameter_is_named_with_its_line(how: str, words: str, function: Callable):
    found = judge(Planted(function, p=draw((8,), seed=1)))
    assert found.verdict == "fails"
    assert found.evidence == "2 of 3 parameters get a gradient at once, lengths 1, 5 in float64"
    place = "" if words == "never used" else r" at test_gradient\.py:\d+"
    end = ", but its result does not reach the output" if words == "used" else ""
    expected = f"p: {how}, {re.escape(words.rstrip())}{place}{end}"
    assert re.fullmatch(expected, found.counterexample or ""), found.counterexample


def write_into_view(m: Any, h: Tensor) -> Tensor:
    buffer = torch.zeros_like(h)
    with torch.no_grad():
        buffer[..., :4].copy_((h * m.p)[..., :4])
    return h + buffer


def test_what_moves_the_output_is_not_said_to_miss_it():
    found = judge(Planted(write_into_view, p=torch.ones(8)))
    words = (
        r"p: none, used at test_gradient\.py:\d+ and moves the output, but a trace does not show "
    )
    assert re.fullmatch(f"{words}where its gradient is cut", found.counterexample or "")


def test_the_line_is_where_it_was_cut():
    found = judge(Planted(multiply_without_grad, p=torch.ones(8))).counterexample or ""
    line = multiply_without_grad.__code__.co_firstlineno + 2
    assert found.endswith(f"test_gradient.py:{line}")


def test_what_cancels_is_no_fault():
    class Cut(nn.Linear):
        pass

    module = nn.Sequential(Cut(8, 8, bias=False), nn.Linear(8, 8), nn.Softmax(-1))
    module[1].bias = nn.Parameter(torch.zeros(1))
    found = judge(module)
    assert found.verdict == "holds"  # every logit has it alike
    assert found.evidence.endswith("1.bias cancels out: changing it never moves the output")


@pytest.mark.parametrize(
    ("how", "cut"), [("none", lambda p: p.detach()), ("zero", lambda p: p.round())]
)
def test_what_a_trace_cannot_see_is_left_out(how: str, cut: Callable[[Tensor], Tensor]):
    def inside(m: Any, h: Tensor) -> Tensor:
        return checkpoint(lambda z: z + cut(m.p), h, use_reentrant=True)

    assert judge(Planted(inside, p=torch.ones(8))).counterexample == f"p: {how}"


def test_many_dead_parameters_are_counted():
    dead = {f"p{i}": torch.ones(8) for i in range(11)}
    found = judge(Planted(lambda m, h: h, **dead)).counterexample or ""
    assert found.startswith("p0: none, never used; p1: none, never used; ")
    assert found.endswith("p7: none, never used; and 3 more")


class Looked(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3, 8, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x[..., 0] > 0).long())


def multiply_in_checkpoint(m: Any, h: Tensor) -> Tensor:
    return checkpoint(lambda z: z * m.p, h, use_reentrant=True)


@pytest.mark.parametrize("make", [Looked, lambda: Planted(multiply_in_checkpoint, p=torch.ones(8))])
def test_right_modules_hold(make: Callable[[], nn.Module], unchecked):
    torch.manual_seed(0)
    found = judge(make())
    assert found.verdict == "holds", found


def test_a_gradient_of_nan_is_a_fault_of_finite_outputs_only():
    root = Planted(lambda m, h: h + (0 * h * m.p).sqrt(), p=torch.ones(8))
    found = judge(root)
    assert found.verdict == "fails"
    assert (found.counterexample or "").startswith("length 1: the gradient of p")
    assert judge(Planted(lambda m, h: h * m.p.log(), p=-torch.ones(8))).verdict == "not decided"


FAILING = {
    "none": lambda: Planted(multiply_without_grad, p=torch.ones(8)),
    "zero": lambda: Planted(lambda m, h: h + m.p.round(), p=draw((8,), seed=1)),
    "tie-only": lambda: Planted(rank, table=draw((6, 8), seed=1)),
    "not finite": lambda: Planted(lambda m, h: h + (0 * h * m.p).sqrt(), p=torch.ones(8)),
}


@pytest.mark.parametrize("make", FAILING.values(), ids=FAILING)
def test_a_failure_can_be_run_again(make: Callable, capsys: pytest.CaptureFixture[str]):
    module = make()
    snippet = judge(module).snippet or ""
    gap = "...  # the module that was certified"
    assert gap in snippet
    assert not re.search(r"^(from|import) lab", snippet, re.MULTILINE)
    with pytest.raises(SystemExit) as left:
        exec(snippet.replace(gap, "module"), {"module": module, "__name__": "again"})
    assert left.value.code == 1
    assert capsys.readouterr().out

"""The law of gradients and submodules: those that are never called are named, and no failure."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.laws import CertifySettings, Verdict
from lab.laws.certification import Certification
from tests.unit.laws.planted_gradients import judge


class Two(nn.Module):
    """A map, and a function of the module and of its output; further submodules by name."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: nn.Module):
        super().__init__()
        self.function = function
        self.map = nn.Linear(8, 8)
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.map(x))


class Encoder(nn.Module):
    """Like an encoder of audio: its own parameter, two layers, and a method beside `forward`."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x * self.scale)

    def encode(self, x: Tensor) -> Tensor:
        return self.layers(x)


def ignore(m: Any, h: Tensor) -> Tensor:
    return h


def call_in_training(m: Any, h: Tensor) -> Tensor:
    return m.part(h) if m.training else h


def call_when_long(m: Any, h: Tensor) -> Tensor:
    return m.part(h) if h.shape[1] > 2 else h


def drop_when_long(m: Any, h: Tensor) -> Tensor:
    return (m.part(h), h)[1] if h.shape[1] > 2 else h


NOTED: dict[str, tuple[Callable, str]] = {
    "never called": (lambda: Two(ignore, part=Encoder()), "part (5 parameters) is"),
    "one of a dict": (
        lambda: Two(
            lambda m, h: m.of["text"](h),
            of=nn.ModuleDict({"text": nn.Linear(8, 8), "audio": nn.Linear(8, 8, bias=False)}),
        ),
        "of.audio (1 parameter) is",
    ),
    "a whole list": (
        lambda: Two(ignore, part=nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])),
        "part (4 parameters) is",
    ),
    "called in training alone": (
        lambda: Two(call_in_training, part=Encoder()).eval(),
        "part (5 parameters) is",
    ),
    "two": (
        lambda: Two(ignore, part=Encoder(), other=Encoder()),
        "part (5 parameters), other (5 parameters) are",
    ),
}

FAILING: dict[str, tuple[Callable, str]] = {
    "its output is dropped": (
        lambda: Two(lambda m, h: (m.part(h), h)[1], part=Encoder()),
        "part.scale: none, used",
    ),
    "dropped at some lengths, not called at others": (
        lambda: Two(drop_when_long, part=nn.Linear(8, 8)),
        "part.weight: none, used",
    ),
    "called, a parameter of its own unused": (
        lambda: Two(lambda m, h: m.part.encode(h), part=Encoder()),
        "part.scale: none, never used",
    ),
    "its weight used by another": (
        lambda: Two(lambda m, h: F.linear(h, m.part.weight.detach()), part=nn.Linear(8, 8)),
        "part.weight: none, cut by Tensor.detach",
    ),
    "its forward called directly and dropped": (
        lambda: Two(lambda m, h: (m.part.forward(h), h)[1], part=nn.Linear(8, 8)),
        "part.weight: none, used",
    ),
    "one of a list of parameters": (
        lambda: Two(lambda m, h: h * m.part[0], part=nn.ParameterList([torch.ones(8)] * 2)),
        "part.1: none, never used",
    ),
    "one of two that a module only holds": (
        lambda: Two(lambda m, h: F.linear(h, m.part.weight), part=nn.Linear(8, 8)),
        "part.bias: none, never used",
    ),
    "a list of parameters": (
        lambda: Two(ignore, part=nn.ParameterList([torch.ones(8)])),
        "part.0: none, never used",
    ),
    "a layer forgotten": (
        lambda: Two(ignore, part=nn.Linear(8, 8)),
        "part.weight: none, never used",
    ),
    "a layer passed over": (
        lambda: Two(
            lambda m, h: m.layers[0](h),
            layers=nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]),
        ),
        "layers.1.weight: none, never used",
    ),
}


@pytest.mark.parametrize(("make", "words"), NOTED.values(), ids=NOTED)
def test_a_submodule_that_is_never_called_is_named(make: Callable, words: str):
    found = judge(make())
    assert found.verdict == "holds"
    assert found.note == f"{words} not called, so not judged"


@pytest.mark.parametrize(("make", "words"), FAILING.values(), ids=FAILING)
def test_a_parameter_of_one_that_is_called_or_used_fails(make: Callable, words: str):
    found = judge(make())
    assert found.verdict == "fails"
    assert (found.counterexample or "").startswith(words)


def test_one_called_with_some_inputs_is_judged():
    found = judge(Two(call_when_long, part=nn.Linear(8, 8)))
    assert (found.verdict, found.note) == ("holds", "")
    assert found.evidence.startswith("4 of 4 parameters get a gradient at once")


def test_one_called_once_others_have_moved_is_judged():
    def call_when_moved(m: Any, h: Tensor) -> Tensor:
        return m.part(h).detach() + h if m.gate.weight.any() else m.gate(h) + h

    gate = nn.Linear(8, 8, bias=False)
    nn.init.zeros_(gate.weight)
    found = judge(Two(call_when_moved, part=nn.Linear(8, 8), gate=gate))
    assert (found.counterexample or "").startswith("part.weight: none, cut by Tensor.detach")


def test_the_failing_ones_alone_are_counted():
    function: Callable[[Any, Tensor], Tensor] = lambda m, h: (m.part(h), h)[1]  # noqa: E731
    found = judge(Two(function, part=nn.Linear(8, 8, bias=False), other=Encoder()))
    assert (found.verdict, found.measured) == ("fails", 1)
    assert "other" not in (found.counterexample or "")
    assert found.evidence.endswith("; note: other (5 parameters) is not called, so not judged")


def test_a_module_of_which_nothing_learns_fails():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x

    assert judge(Idle()).verdict == "fails"


class Reads(nn.Module):
    """Reads tokens; its `tower` is for what it is not given."""

    def __init__(self):
        super().__init__()
        self.table, self.tower = nn.Embedding(9, 8), nn.Sequential(nn.Linear(8, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


def test_the_certificate_names_it_as_the_target_does():
    certification = Certification(Reads(), replace(CertifySettings(), lengths=(3,)))
    found: Verdict = certification.judge("gradient reach")
    words = "tower (2 parameters) is not called, so not judged"
    assert (found.verdict, found.note) == ("holds", words)
    assert found.evidence.endswith(f"; note: {words}")

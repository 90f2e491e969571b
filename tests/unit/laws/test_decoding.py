"""The laws of decoding, positions and padding: right decoders pass, counter-examples are smallest.

`test_calibration` has the planted faults of these laws.
"""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lab.laws import (
    LAWS,
    Certification,
    CertifySettings,
    Probes,
    Verdict,
    certify,
    decoding,
)
from lab.layers.state import next_position
from tests.planted import FAULTS
from tests.planted.cached import CachedAttention, LeastMask


class Hidden(NamedTuple):
    hidden: Tensor
    position: Tensor


class DecodedGRU(nn.Module):
    """torch's GRU, which carries its hidden state and leaves padding out."""

    relative = True

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(16, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]

    def start(self, batch: int, position: int = 0) -> Hidden:
        zeros = torch.zeros(batch, 16, dtype=next(self.parameters()).dtype)
        return Hidden(zeros, torch.full((batch,), position))

    def prefill(
        self, x: Tensor, state: Hidden | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Hidden]:
        hidden = self.start(len(x)).hidden if state is None else state.hidden
        after = next_position(x, state, keep)
        if keep is None:
            y, last = self.gru(x, hidden[None])
            return y, Hidden(last[0], after)
        outputs = []
        for token, kept in zip(x.split(1, 1), keep.split(1, 1), strict=True):
            _, last = self.gru(token, hidden[None])
            hidden = last[0].where(kept, hidden)
            outputs.append(hidden)
        return torch.stack(outputs, 1), Hidden(hidden, after)

    def step(self, x: Tensor, state: Hidden) -> tuple[Tensor, Hidden]:
        y, state = self.prefill(x[:, None], state)
        return y[:, 0], state


def judge(module: nn.Module) -> dict[str, Verdict]:
    module = module.double()
    probes = Probes(CertifySettings(16, (1, 2, 5, 16), seconds=60.0))
    names = ("prefill = step", "relative", "padding")
    return {name: LAWS[name].judge(module, probes) for name in names}


def build_fault(name: str) -> nn.Module:
    torch.manual_seed(0)
    return next(fault for fault in FAULTS if fault.name == name).build()


@pytest.mark.parametrize("build", [CachedAttention, DecodedGRU])
def test_right_decoders_pass(build: type[nn.Module]):
    torch.manual_seed(0)
    found = certify(build(), d_model=16, lengths=(1, 2, 5, 16), max_len=1024, rounding_len=64)
    for v in found:
        undecided = {
            "matrix applies": "not applicable",
            "documents do not mix": "not applicable",
            "forms agree": "not decided",
        }
        assert v.verdict == undecided.get(v.law, "holds"), v


def test_the_counterexample_is_the_smallest():
    found = judge(build_fault("step at position zero"))["prefill = step"]
    words = "length 2: decoding token by token from the start moves output 1 of row 0"
    assert found.counterexample == words
    assert judge(build_fault("row of padding gives NaN"))["padding"].counterexample == (
        "length 1: left padding gives NaN or infinity at position 0 of row 0"
    )


def test_absolute_positions_are_no_fault_where_they_are_said():
    module = build_fault("absolute positions in the keys")
    assert judge(module)["relative"].verdict == "fails"
    module.relative = False  # type: ignore[reportAttributeAccessIssue]
    assert judge(module)["relative"].verdict == "not applicable"
    assert judge(module)["prefill = step"].verdict == "holds"


def test_what_does_not_decode_is_not_asked_to():
    assert {v.verdict for v in judge(nn.Linear(16, 16)).values()} == {"not applicable"}


def test_what_fails_in_double_precision_alone_is_a_note():
    settings = CertifySettings(16, (1, 7))
    found = Certification(LeastMask(), settings).judge("padding")
    assert found.verdict == "holds"
    assert "padding gives NaN or infinity" in found.evidence
    assert "in float64 alone, 0 in float32" in found.evidence
    kept = Certification(build_fault("row of padding gives NaN"), settings).judge("padding")
    assert kept.verdict == "fails"
    assert kept.evidence.endswith("in float64, inf in float32")


def test_other_laws_refer_a_leak_to_causal():
    found = judge(build_fault("mask off by one beside a cache"))
    assert found["relative"].verdict == "holds"
    for name in ("prefill = step", "padding"):
        assert found[name].verdict == "not decided"
        assert found[name].evidence.startswith("outputs depend on later tokens, which causal")


class Unpositioned(DecodedGRU):
    """A decoder whose state is a tuple without a position; its steps may change it in place."""

    relative = False

    def __init__(self, in_place: bool):
        super().__init__()
        self.in_place = in_place

    def start(self, batch: int, position: int = 0) -> Any:
        return tuple(super().start(batch, position))

    def prefill(self, x: Tensor, state: Any = None, keep: Tensor | None = None) -> Any:
        y, after = super().prefill(x, Hidden(*(state or self.start(len(x)))), keep)
        return y, tuple(after)

    def step(self, x: Tensor, state: Any) -> Any:
        y, after = super().step(x, state)
        if self.in_place:
            state[0].copy_(after[0])
        return y, after


@pytest.mark.parametrize("in_place", [False, True])
def test_a_state_need_not_tell_its_position(in_place):
    settings = CertifySettings(16, (2, 5))
    found = Certification(Unpositioned(in_place), settings).judge("prefill = step")
    assert found.verdict == ("fails" if in_place else "holds"), found
    if in_place:
        assert "a second time" in (found.counterexample or "")


def test_noise_hides_no_output_that_is_not_finite():
    settings = CertifySettings(16, (1, 2, 9))
    found = Certification(build_fault("angles in fp16"), settings).judge("relative")
    assert found.verdict == "fails"
    words = "length 1: starting at position 100000 moves output 0 of row 0"
    assert (found.counterexample or "").startswith(words)
    assert "relative error nan" in found.evidence


def test_noise_without_a_fault_stays_undecided(monkeypatch):
    monkeypatch.setattr(decoding, "SHIFTS", (1_000,))
    settings = CertifySettings(16, (1, 2, 9))
    found = Certification(build_fault("angles in fp16"), settings).judge("relative")
    assert found.verdict == "not decided"
    assert "rounding the input moves the output by" in found.evidence

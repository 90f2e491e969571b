"""The laws of decoding, positions and padding: right decoders pass, planted faults are found."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lab.laws import LAWS, CertifySettings, Probes, Verdict, certify
from lab.layers.state import next_position, token_positions
from lab.ops.rope import rotate


class Cache(NamedTuple):
    k: Tensor  # [b s d]
    v: Tensor  # [b s d]
    kept: Tensor  # [b s]
    position: Tensor  # [b]


def turned(x: Tensor, positions: Tensor) -> Tensor:
    return rotate(x[:, :, None], positions)[:, :, 0]


class CachedAttention(nn.Module):
    """Causal attention with rotary positions over a cache, written out; and one fault, if named."""

    relative = True

    def __init__(self, fault: str = ""):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(8, 24)
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        return self.prefill(x)[0]

    def start(self, batch: int, position: int = 0) -> Cache:
        none = self.qkv.weight.new_zeros(batch, 0, 8)
        return Cache(none, none, none[..., 0].bool(), torch.full((batch,), position))

    def prefill(
        self, x: Tensor, state: Cache | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        before = self.start(len(x)) if state is None else state
        position = next_position(x, before, None if self.fault == "counts padding" else keep)
        kept = x.new_ones(x.shape[:2], dtype=torch.bool) if keep is None else keep
        positions = token_positions(
            x.shape[1], x.device, None if self.fault == "restarts" else before, keep
        )
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.fault == "absolute":
            k = k + positions[..., None].sin()
        q, k = (turned(z, positions) for z in (q, k))
        if self.fault == "turns steps twice" and x.shape[1] == 1:
            q = turned(q, positions)
        k, v = torch.cat([before.k, k], 1), torch.cat([before.v, v], 1)
        kept = torch.cat([before.kept, kept], 1)
        t, s = x.shape[1], k.shape[1]
        seen = torch.ones(t, s, dtype=torch.bool).tril(s - t)
        if self.fault == "reads padding":
            seen = seen.expand(len(x), -1, -1)
        else:
            seen = seen & kept[:, None]
        scores = (q @ k.mT / 8**0.5).masked_fill(~seen, -torch.inf)
        if self.fault != "empty rows":
            scores = scores.masked_fill(~seen.any(-1, keepdim=True), 0)
        y = scores.softmax(-1) @ v
        if self.fault == "stale" and state is not None:
            return y, before
        if self.fault == "in place":
            before.v.mul_(0.5)
        return y, Cache(k, v, kept, position)

    def step(self, x: Tensor, state: Cache) -> tuple[Tensor, Cache]:
        y, state = self.prefill(x[:, None], state)
        return y[:, 0], state


class Hidden(NamedTuple):
    hidden: Tensor
    position: Tensor


class DecodedGRU(nn.Module):
    """torch's GRU, which carries its hidden state."""

    relative = True

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]

    def start(self, batch: int, position: int = 0) -> Hidden:
        zeros = torch.zeros(batch, 8, dtype=next(self.parameters()).dtype)
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


def verdicts(module: nn.Module) -> dict[str, Verdict]:
    module = module.double()
    probes = Probes(CertifySettings(8, (1, 2, 5, 16), seconds=60.0))
    return {
        name: LAWS[name].judge(module, probes) for name in ("prefill = step", "relative", "padding")
    }


@pytest.mark.parametrize("build", [CachedAttention, DecodedGRU])
def test_right_decoders_pass(build: type[nn.Module]):
    found = certify(build(), 8, (1, 2, 5, 16), max_len=1024, rounding_len=64)
    for v in found:
        undecided = {"matrix applies": "not applicable", "forms agree": "not decided"}
        assert v.verdict == undecided.get(v.law, "holds"), v


@pytest.mark.parametrize(
    ("fault", "laws"),
    [
        ("stale", {"prefill = step", "relative"}),
        ("restarts", {"prefill = step"}),
        ("turns steps twice", {"prefill = step"}),
        ("in place", {"prefill = step"}),
        ("absolute", {"relative"}),
        ("reads padding", {"padding"}),
        ("counts padding", {"padding"}),
        ("empty rows", {"padding"}),
    ],
)
def test_planted_faults_are_found(fault: str, laws: set[str]):
    found = verdicts(CachedAttention(fault))
    assert {name for name, v in found.items() if v.verdict == "fails"} == laws, found
    assert all(found[name].counterexample for name in laws)


def test_the_counterexample_is_the_smallest():
    found = verdicts(CachedAttention("restarts"))["prefill = step"]
    words = "length 2: going by steps from the start moves output 1 of row 0"
    assert found.counterexample == words
    assert verdicts(CachedAttention("empty rows"))["padding"].counterexample == (
        "length 1: left padding gives NaN or infinity at position 0 of row 0"
    )


def test_absolute_positions_are_no_fault_where_they_are_said():
    module = CachedAttention("absolute")
    module.relative = False
    assert verdicts(module)["relative"].verdict == "not applicable"
    assert verdicts(module)["prefill = step"].verdict == "holds"


def test_what_does_not_decode_is_not_asked_to():
    assert {v.verdict for v in verdicts(nn.Linear(8, 8)).values()} == {"not applicable"}

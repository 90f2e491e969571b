"""Models computed together have the losses and gradients that each has alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lab.lengthening import Stage
from lab.models import build
from lab.ops.cross_entropy import linear_cross_entropy
from lab.training.gradients import differentiate, differentiate_lanes
from lab.training.lane_time import measure_lanes
from tasks.flip_flop import FlipFlop
from tasks.mqar import MQAR

TASK = MQAR(seq_len=16, vocab_size=64)
STACKS = {
    "attention": ("AM*2", {}),
    "one key head": ("AM", {"A.n_kv_heads": 1}),
    "value mask": ("AM AN", {"A.mask": "value"}),
    "soft mask, window": ("AM", {"A.mask": "soft", "A.window": 3}),
    "straight-through mask": ("AM", {"A.mask": "straight-through"}),
    "oracle mask": ("AM IM", {"A.mask": "oracle"}),
    "SSD": ("SM*2", {}),
    "SSD, convolution": (
        "SM",
        {"S.position": "conv", "S.gate": "norm", "S.dt_init": "mamba2", "S.n_groups": 2},
    ),
    "SSD, tiled groups": ("SN", {"S.groups": "tiled", "S.n_groups": 2}),
    "SSD, no position": ("SM", {"S.position": "none", "S.gate": "silu"}),
    "IFA, CDMoE": ("SE IE", {}),
    "IFA": ("IM", {"I.retrieval": "straight-through", "I.n_values": 4, "I.k": 2}),
    "CDMoE, dense": ("SE", {"E.backend": "dense"}),
    "CDMoE, gather": ("SE", {"E.backend": "gather"}),
    "routed": ("AR", {}),
    "routed, loop": ("AR SX", {"R.backend": "loop"}),
    "PEER": ("AP NM", {}),
    "no mixer": ("NM", {}),
}


def build_lanes(stack, options, n_lanes=3, dtype=torch.float64, **given):
    return [
        build(stack, vocab_size=64, d_model=16, n_heads=2, seed=z, options=options, **given).to(
            dtype
        )
        for z in range(n_lanes)
    ]


def take_gradients(models):
    found = [[None if p.grad is None else p.grad.clone() for p in m.parameters()] for m in models]
    for model in models:
        model.zero_grad(set_to_none=True)
    return found


def assert_as_alone(models, batches, precision, share):
    """Together is as alone, up to a share of each parameter's largest gradient."""
    together = differentiate_lanes(models, batches, precision)
    found = take_gradients(models)
    alone = [differentiate(m, b, precision) for m, b in zip(models, batches, strict=True)]
    for mine, own in zip(together, alone, strict=True):
        assert (mine.loss - own.loss).abs() <= share * own.loss
        assert mine.correct == own.correct
        assert mine.scored == own.scored
    for grads, model in zip(found, models, strict=True):
        for grad, (name, p) in zip(grads, model.named_parameters(), strict=True):
            if p.grad is None:
                assert grad is None or not grad.any(), name
            else:
                assert grad is not None, name
                assert (grad - p.grad).abs().max() <= share * p.grad.abs().max(), name


@pytest.mark.parametrize("name", STACKS)
def test_every_layer_has_the_gradients_of_one_alone(name):
    batches = [TASK.batch(size=4, seed=z) for z in range(3)]
    assert_as_alone(build_lanes(*STACKS[name]), batches, "fp32", 1e-12)
    # fp32 rounds to 24 bits; sums over rows of up to a few hundred terms lose some of them.
    assert_as_alone(build_lanes(*STACKS[name], dtype=torch.float32), batches, "fp32", 1e-5)


@pytest.mark.parametrize("stack", ["AM SM", "AR"])
def test_in_bf16_too(stack):
    # Without retrieved experts: alone, too, rounding to 8 bits chooses others.
    batches = [TASK.batch(size=4, seed=z) for z in range(2)]
    models = build_lanes(stack, {}, 2, torch.float32)
    assert_as_alone(models, batches, "bf16", 0.05)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_the_head_multiplies_in_the_precision_asked_for(precision, dtype, monkeypatch):
    def watch(hidden, weight, targets, **options):
        dtypes.append((hidden.dtype, weight.dtype))
        return linear_cross_entropy(hidden, weight, targets, **options)

    monkeypatch.setattr("lab.training.gradients.linear_cross_entropy", watch)
    dtypes, batches = [], [TASK.batch(size=4, seed=z) for z in range(2)]
    models = build_lanes("AM", {}, 2, torch.float32)
    differentiate_lanes(models, batches, precision)
    differentiate(models[0], batches[0], precision)
    assert dtypes == [(dtype, dtype)] * 3


@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from([4, 6, 16, 34]),
    st.sampled_from(["AM", "SM", "AN SE"]),
    st.booleans(),
    st.integers(0, 99),
)
def test_whatever_the_lanes_and_rows(n_lanes, rows, seq_len, stack, tied, seed):
    task = FlipFlop(seq_len=seq_len)
    models = build_lanes(stack, {}, n_lanes, tied=tied)
    batches = [task.batch(start=z * seed, size=rows, seed=seed) for z in range(n_lanes)]
    assert_as_alone(models, batches, "fp32", 1e-11)


def test_lanes_do_not_mix():
    batches = [TASK.batch(size=4, seed=z) for z in range(3)]
    models = build_lanes("AM SE", {})
    before = differentiate_lanes(models, batches, "fp32")
    kept = take_gradients(models)
    with torch.no_grad():
        models[1].embed.weight.mul_(1.1)
    batches[1] = TASK.batch(size=4, seed=9)
    after = differentiate_lanes(models, batches, "fp32")
    moved = take_gradients(models)
    for z in (0, 2):
        assert torch.equal(before[z].loss, after[z].loss)
        torch.testing.assert_close(kept[z], moved[z], rtol=0, atol=0)
    assert not torch.equal(before[1].loss, after[1].loss)


class Average(nn.Module):
    def __init__(self, d_model: int, n_heads: int = 1):
        super().__init__()
        self.value = nn.Linear(d_model, d_model)

    def forward(self, x):
        count = torch.arange(1, x.shape[1] + 1, device=x.device)
        return self.value(x).cumsum(1) / count[:, None]


class Dropped(Average):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


class DroppedLayer(Average):
    def __init__(self, d_model: int, n_heads: int = 1):
        super().__init__(d_model)
        self.drop = nn.Dropout(0.1)


class Branching(Average):
    def forward(self, x):
        return super().forward(x) * (2.0 if x.sum().item() > 0 else 1.0)


class Counting(Average):
    def __init__(self, d_model: int, n_heads: int = 1):
        super().__init__(d_model)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x)


class Remembering(Average):
    """Mixes lanes through an attribute, which no error shows."""

    last = None

    def forward(self, x):
        y = super().forward(x) * (1.0 if type(self).last is None else 1.5)
        type(self).last = 1
        return y


def measure_user(cls):
    models = build_lanes("UM", {}, 2, torch.float32, model=f"{__name__}:{cls.__name__}")
    return measure_lanes(models, [Stage(TASK, 2, 1)], "fp32", 0.0)


def test_a_users_mixer_runs_through_vmap():
    found = measure_user(Average)
    assert not found.obstacle
    assert found.together > 0
    assert found.apart > 0


@pytest.mark.parametrize(
    ("cls", "says"),
    [
        (Dropped, "torch.func.vmap cannot run Dropped: vmap: called random operation"),
        (DroppedLayer, "dropout and batch normalisation need each run's own state"),
        (Branching, "torch.func.vmap cannot run Branching"),
        (Counting, "a mixer changes its buffers in training"),
        (Remembering, "the gradients of together are not those of one after another"),
    ],
)
def test_where_vmap_cannot_it_is_said(cls, says):
    found = measure_user(cls)
    assert found.obstacle.startswith(says)
    assert not found.shared

"""Recorded steps are those that are taken one call after another.

Without a GPU a replay is imitated: it does the call again, and writes into the first results.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab.config import TrainConfig
from lab.models import build
from lab.training import graphs
from lab.training.graphs import RecordedStep
from lab.training.loop import differentiate, fit, start
from tasks import TASKS
from tasks.base import Batch, Schedule, Task
from tasks.mqar import MQAR

SMALL = MQAR(seq_len=64, vocab_size=256)
TRAIN = TrainConfig(batch_size=16, test_rows=64, optimizer="adamw", max_steps=8)
MODELS = [
    ("AM*2", {}),
    ("AM*2", {"A.mask": "soft"}),
    ("AM*2", {"A.mask": "value"}),
    ("AM*2", {"A.mask": "oracle"}),
    ("IM*2", {}),
    ("SM*2", {}),
    ("SM*2", {"S.position": "conv"}),
    ("SE IE", {}),
]
WHOLE = [False] + 7 * [True]
"""Which steps are recorded: all but the first."""
SYNTHETIC = [name for name in TASKS if name != "bytes" and not TASKS[name].vectors]


class Imitation:
    """A `RecordedCall` without a GPU."""

    def __init__(self, call: Callable[[], object], device: torch.device, *, rehearse: bool = True):
        self._call = call
        self.result = call() if rehearse else None

    def __call__(self) -> object:
        for held, new in zip(list_tensors(self.result), list_tensors(self._call()), strict=True):
            held.copy_(new)
        return self.result


def list_tensors(result: object) -> list[Tensor]:
    """List the tensors of a result that a replay writes anew."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Batch):
        return [result.inputs, result.targets, *result.links.values()]
    return [z for part in result for z in list_tensors(part)] if isinstance(result, tuple) else []


@pytest.fixture
def imitated(monkeypatch):
    monkeypatch.setattr("lab.training.loop.can_record", lambda device: True)
    monkeypatch.setattr(graphs, "RecordedCall", Imitation)


def make_small(name: str) -> Task:
    return TASKS[name](**TASKS[name].presets["small"].options)


def train(
    task: Task,
    stack: str,
    *,
    may_record: bool,
    device: str = "cpu",
    options: dict | None = None,
    config: TrainConfig = TRAIN,
) -> tuple[Tensor, list[Tensor], list[bool]]:
    """Return the losses and the weights after training in fp64, and which steps were recorded."""
    model = build(stack, vocab_size=task.vocab_size, d_model=32, options=options or {})
    state = start(model.double().to(device), config, "fp32")
    whole, recorded, losses = RecordedStep.differentiate, [], []

    def differentiate_recorded(step: RecordedStep, first: int):
        found = whole(step, first)
        recorded[-1] = step.whole
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordedStep, "differentiate", differentiate_recorded)
        steps = fit(task, state, config, may_record=may_record)
        while True:
            recorded.append(False)
            row = next(steps, None)
            if row is None:
                break
            losses.append(row.loss)
    return torch.tensor(losses), [p.detach().cpu() for p in model.parameters()], recorded[:-1]


def assert_same(
    task: Task, stack: str, options: dict, device: str, config: TrainConfig = TRAIN
) -> list[bool]:
    """Check that recorded steps are the plain ones; return which steps were recorded."""
    given = {"device": device, "options": options, "config": config}
    losses, weights, recorded = train(task, stack, may_record=True, **given)
    plain, theirs, none = train(task, stack, may_record=False, **given)
    assert not any(none)
    torch.testing.assert_close(losses, plain, rtol=1e-9, atol=0)
    for mine, other in zip(weights, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-7, atol=1e-9)
    return recorded


@pytest.mark.gpu
@pytest.mark.parametrize(("stack", "options"), MODELS)
def test_on_a_gpu_recorded_steps_are_the_plain_ones(stack, options):
    assert assert_same(SMALL, stack, options, "cuda") == WHOLE


@pytest.mark.gpu
@pytest.mark.parametrize("name", SYNTHETIC)
def test_on_a_gpu_every_task_trains_as_without_graphs(name):
    assert_same(make_small(name), "AM", {}, "cuda")


@pytest.mark.gpu
def test_on_a_gpu_each_stage_is_recorded_anew():
    config = TrainConfig(
        batch_size=64, lengthen=True, lengthen_at=0.05, start_len=16, max_steps=300, eval_every=25
    )
    model = build("AM*2", vocab_size=256, d_model=64).cuda()
    rows = list(fit(SMALL, start(model, config, "fp32"), config))
    assert {row.seq_len for row in rows} == {16, 32, 64}
    assert rows[-1].accuracy > 0.05


@pytest.mark.parametrize(("stack", "options"), MODELS)
def test_recorded_steps_are_the_plain_ones(imitated, stack, options):
    assert assert_same(SMALL, stack, options, "cpu") == WHOLE


def test_rows_are_drawn_anew_with_what_an_oracle_mask_is_told(imitated):
    assert assert_same(make_small("overwrite"), "AM", {"A.mask": "oracle"}, "cpu") == WHOLE


def test_rows_that_no_graph_can_draw_are_drawn_by_calls(monkeypatch):
    def refuse_rows(call, device, *, rehearse=True):
        if call.__name__ == "_generate":
            raise RuntimeError("called a synchronizing CUDA operation")
        return Imitation(call, device, rehearse=rehearse)

    monkeypatch.setattr("lab.training.loop.can_record", lambda device: True)
    monkeypatch.setattr(graphs, "RecordedCall", refuse_rows)
    assert assert_same(make_small("overwrite"), "AM", {"A.mask": "oracle"}, "cpu") == WHOLE


@pytest.mark.parametrize("count", [3, 15])
def test_more_scored_positions_than_were_recorded_end_the_recording(imitated, monkeypatch, count):
    monkeypatch.setattr(graphs, "_count_positions", lambda batch: count)
    assert not any(assert_same(SMALL, "AM", {}, "cpu"))


@pytest.mark.parametrize(("model", "count"), [*zip(MODELS[::3], (17, 40, 64), strict=True)])
def test_positions_that_are_not_scored_count_for_nothing(imitated, monkeypatch, model, count):
    monkeypatch.setattr(graphs, "_count_positions", lambda batch: count)
    stack, options = model
    assert assert_same(SMALL, stack, options, "cpu") == WHOLE


@pytest.mark.parametrize(("first", "last"), [(16, 4), (4, 16)])
def test_rows_may_come_to_differ(imitated, first, last):
    pairs: dict[str, Any] = {"n_pairs": Schedule(first, last, 64)}
    task = MQAR(seq_len=64, vocab_size=256, **pairs)
    assert_same(task, "AM", {}, "cpu")


@pytest.mark.parametrize("name", ["flip_flop", "language"])
def test_rows_may_differ_in_scored_positions(imitated, name):
    assert assert_same(make_small(name), "AM", {}, "cpu") == WHOLE


def test_rows_of_vectors_are_not_recorded(imitated, monkeypatch):
    monkeypatch.setattr("lab.training.loop.RecordedStep", None)  # cannot be called
    task = make_small("regression")
    model = build("AM", **task.sizes, d_model=16)
    assert len(list(fit(task, start(model, TRAIN, "fp32"), TRAIN))) == TRAIN.max_steps


def test_a_mixer_of_another_package_is_not_recorded():
    model = build("AM", vocab_size=256, d_model=32)
    model.blocks[0].mixer = nn.Identity()
    with pytest.raises(RuntimeError, match="a mixer that is not the lab's"):
        graphs.check_recordable(model)


def test_a_watched_model_is_not_recorded():
    model = build("AM", vocab_size=256, d_model=32)
    model.register_forward_hook(lambda *call: None)
    with pytest.raises(RuntimeError, match="a hook is attached"):
        graphs.check_recordable(model)


@pytest.mark.parametrize(("stack", "options"), MODELS)
def test_gradients_depend_on_no_value_that_a_graph_would_wait_for(monkeypatch, stack, options):
    """On the meta device there are no values, so reading one raises."""
    monkeypatch.setattr(torch, "autocast", lambda *given, **options: nullcontext())
    model = build(stack, vocab_size=256, d_model=32, options=options).to("meta")
    batch = SMALL.batch(size=4, device="meta")
    differentiate(model, batch, "fp32", per_row=16)
    assert all(p.grad is not None for p in model.parameters())

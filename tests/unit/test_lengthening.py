"""Lengthening: its stages, when it goes on, that a resume is exact, and what it refuses."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from lab.config import ModelConfig, Runtime, TrainConfig
from lab.lengthening import explain_start_length, list_stages
from lab.models import build
from lab.training.experiment import carry_out
from lab.training.loop import Row, fit, start
from lab.training.run import Run
from tasks import TASKS
from tasks.base import IGNORE, Schedule, count_right
from tasks.reader import BatchReader

MQAR = TASKS["mqar"]
UNTIMED = {"seconds": 0, "cpu_seconds": 0}
GROWING = [name for name in TASKS if TASKS[name].grows]
FIXED = [name for name in TASKS if not TASKS[name].grows]


def lengths(task, **options) -> list[int]:
    return [
        stage.task.seq_len
        for stage in list_stages(task, TrainConfig(**{"lengthen": True, **options}))
    ]


def test_rows_double_up_to_the_length_asked_for():
    assert lengths(MQAR(seq_len=256)) == [8, 16, 32, 64, 128, 256]
    assert lengths(MQAR(seq_len=256), start_len=64) == [64, 128, 256]
    assert lengths(MQAR(seq_len=256), shortest_len=16) == [16, 32, 64, 128, 256]
    assert lengths(MQAR(seq_len=256), shortest_len=24) == [32, 64, 128, 256]
    assert lengths(MQAR(seq_len=256), shortest_len=512) == [256]
    assert lengths(MQAR(seq_len=256), shortest_len=32, start_len=8)[0] == 8
    assert lengths(MQAR(seq_len=96), start_len=16) == [16, 32, 64, 96]
    assert lengths(MQAR(seq_len=256), lengthen=False) == [256]
    assert lengths(MQAR(seq_len=256), start_len=256) == [256]
    assert lengths(MQAR(seq_len=256), init="oracle") == [256]


@pytest.mark.parametrize("name", list(TASKS))
def test_tokens_a_step_stay_the_same(name: str):
    task = TASKS[name]()
    parts = list_stages(task, TrainConfig(lengthen=True, batch_size=8))
    tokens = [part.batch_size * part.task.seq_len for part in parts]
    assert all(
        8 * task.seq_len - part.task.seq_len < n <= 8 * task.seq_len
        for n, part in zip(tokens, parts, strict=True)
    )
    assert parts[-1].task is task


@pytest.mark.parametrize("name", GROWING)
def test_a_task_that_grows_starts_with_short_rows_of_its_own(name: str):
    task = TASKS[name]()
    parts = list_stages(task, TrainConfig(lengthen=True))
    assert TrainConfig.shortest_len <= parts[0].task.seq_len <= 32
    for part in parts:
        batch = part.task.batch(split="validation", size=4)
        assert batch.inputs.shape[:2] == (4, part.task.seq_len)
        assert part.task.sizes == task.sizes
        answers = part.task.oracle(batch)
        right = count_right(answers, batch.find_nearest(answers))
        assert right.equal(part.task.count_asked(batch))
        kept = {option: value for option, value in task.options.items() if option not in task.grows}
        assert kept.items() <= part.task.options.items()


@pytest.mark.parametrize("name", FIXED)
def test_a_task_that_does_not_grow_says_why(name: str):
    task = TASKS[name](**TASKS[name].presets["small"].options)
    assert lengths(task) == [task.seq_len]
    half = task.seq_len // 2
    why = f"start_len={half}: seq_len={half}: {name} cannot shorten its rows: {task.why_fixed}"
    with pytest.raises(ValueError, match=why):
        lengths(task, start_len=half)


def test_the_share_of_pairs_is_kept_and_pairs_given_by_hand_are_too():
    def grown(name: str, **options) -> list[tuple[int, int]]:
        """Row lengths, and how many answers a row has at each."""
        parts = list_stages(TASKS[name](**options), TrainConfig(lengthen=True))
        found = [part.task.batch(size=1) for part in parts]
        return [(b.inputs.shape[1], int((b.targets != IGNORE).sum())) for b in found]

    assert grown("mqar", seq_len=64) == [(8, 2), (16, 4), (32, 8), (64, 16)]
    assert grown("mqar", seq_len=64, n_pairs=16) == [(8, 2), (16, 4), (32, 8), (64, 16)]
    assert grown("mqar", seq_len=64, n_pairs=4) == [(16, 4), (32, 4), (64, 4)]
    assert lengths(MQAR(seq_len=64, n_pairs=(2, 8))) == [32, 64]
    grid = grown("compositional", seq_len=256, n_pairs=36)
    assert grid == [(32, 4), (64, 9), (128, 16), (256, 36)]


def test_rows_that_vary_by_themselves_are_left_alone():
    assert lengths(MQAR(seq_len=(64, 128))) == [128]
    assert lengths(MQAR(seq_len=64, n_pairs=Schedule(2, 4, 100))) == [64]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start_len": 128}, "start_len=128: must divide seq_len=64, as 64 does$"),
        ({"start_len": 24}, "start_len=24: must divide seq_len=64, as 16 and 32 do$"),
        ({"start_len": 2}, "start_len=2: seq_len=2: too short"),
        ({"start_len": 8, "lengthen": False}, "start_len=8: needs --lengthen"),
        ({"lengthen_at": 0.0001}, r"lengthen_at=0.0001: must be in \(0.000244, 1\], above chance"),
        ({"train_rows": 96, "batch_size": 32}, "train_rows=96: must be a multiple of the 256 rows"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        list_stages(MQAR(seq_len=64), TrainConfig(**{"lengthen": True, **options}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengthen_at": 1.5}, r"lengthen_at=1.5: must be in \(0, 1\]"),
        ({"start_len": 0}, "start_len=0: must be ≥ 1"),
        ({"shortest_len": 0}, "shortest_len=0: must be ≥ 1"),
        ({"stage_steps": 0}, "stage_steps=0: must be ≥ 1"),
        ({"unlearned": "go"}, "unlearned='go': must be one of stop, lengthen"),
    ],
)
def test_what_no_task_takes(options, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**options)


TASK = TASKS["flip_flop"](seq_len=32, p_ignore=0.5)
CONFIG = TrainConfig(
    lengthen=True,
    batch_size=8,
    max_steps=60,
    warmup_steps=5,
    learning_rate=1e-2,
    eval_every=5,
    test_rows=16,
    lengthen_at=0.55,
    precision="fp32",
)


def rows(**changes) -> list[Row]:
    config = replace(CONFIG, **changes)
    model = build("AM", vocab_size=TASK.vocab_size, d_model=16)
    return list(fit(TASK, start(model, config, "fp32"), config))


def test_a_length_follows_once_validation_rows_of_the_one_before_are_right():
    seen = rows()
    assert {row.seq_len for row in seen} == {8, 16, 32}
    for before, after in pairwise(seen):
        learned = (before.validation_accuracy or 0.0) >= 0.55 and before.seq_len < 32
        assert after.seq_len == (2 if learned else 1) * before.seq_len
    assert all(row.test_accuracy is None for row in seen[:-1])
    assert seen[-1].test_accuracy is not None


def test_the_test_split_is_read_only_when_validation_says_solved(monkeypatch):
    splits = []
    batch = type(TASK).batch

    def spy(self, *, split="train", **options):
        splits.append((split, self.seq_len))
        return batch(self, split=split, **options)

    monkeypatch.setattr(type(TASK), "batch", spy)
    seen = rows(solved_at=0.55)
    tested = [row.step for row in seen if row.test_accuracy is not None]
    promising = [
        row.step
        for row in seen
        if (row.seq_len == 32 and (row.validation_accuracy or 0) >= 0.55) or row.step == 60
    ]
    assert tested == promising
    assert {length for split, length in splits if split == "test"} == {32}


def test_a_stage_that_is_not_learned_ends_the_run():
    seen = rows(lengthen_at=1.0, stage_steps=12)
    assert [row.step for row in seen] == list(range(1, 13))
    assert {row.seq_len for row in seen} == {8}
    assert seen[-1].validation_accuracy is not None


def test_rows_that_are_not_learned_lengthen_if_asked():
    seen = rows(lengthen_at=1.0, stage_steps=12, unlearned="lengthen", max_steps=30)
    lengths = [8] * 12 + [16] * 12 + [32] * 6
    assert [row.seq_len for row in seen] == lengths
    assert [row.step for row in seen if row.validation_accuracy is not None][-1] == 30
    assert seen[11].validation_accuracy is not None


def test_the_last_step_does_not_lengthen():
    model = build("AM", vocab_size=TASK.vocab_size, d_model=16)
    config = replace(CONFIG, max_steps=30, eval_every=30, lengthen_at=0.51)
    state = start(model, config, "fp32")
    (*_, last) = fit(TASK, state, config)
    assert (last.validation_accuracy or 0.0) >= 0.51
    assert (state.stage, state.step) == (0, 30)


def test_rows_that_come_again_stay_within_the_training_set(monkeypatch):
    task, read = TASKS["flip_flop"](seq_len=48, p_ignore=0.5), []
    one_batch = BatchReader.read

    def spy(self, start):
        batch = one_batch(self, start)
        read.append(start + len(batch.inputs))
        return batch

    monkeypatch.setattr(BatchReader, "read", spy)
    config = replace(CONFIG, start_len=16, batch_size=2, train_rows=6, lengthen_at=0.51)
    model = build("AM", vocab_size=task.vocab_size, d_model=16)
    seen = list(fit(task, start(model, config, "fp32"), config))
    assert {row.seq_len for row in seen} == {16, 32, 48}
    assert max(read) == 6


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"seq_len": 64}, ""),
        ({"seq_len": 64, "n_pairs": 4}, "n_pairs=4: must be in 1 … 2"),
        ({"seq_len": 100}, "seq_len=25: must be even"),
        ({"seq_len": (32, 64)}, "seq_len already varies"),
    ],
)
def test_why_rows_do_not_start_shorter_is_said(options, why):
    found = explain_start_length(MQAR(**options), TrainConfig(lengthen=True))
    assert found.startswith(why) if not found.startswith("seq_len=32: ") else why in found
    assert bool(found) == bool(why)
    assert not explain_start_length(MQAR(**options), TrainConfig())


class CrashError(Exception):
    """Ends a run in the middle."""


def make(path: Path) -> Run:
    return Run(path, TASK, ModelConfig(stack="AM", d_model=16), CONFIG)


def weights(run: Run) -> dict[str, torch.Tensor]:
    return run.load_state("cpu").model.weights()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Run:
    run = make(tmp_path_factory.mktemp("unbroken") / "run")
    carry_out(run, Runtime(device="cpu", checkpoint_every=7))
    return run


def first_steps(run: Run) -> list[int]:
    """Return the first step of each stage."""
    found: dict[int, int] = {}
    for row in run.read_metrics():
        found.setdefault(row["seq_len"], row["step"])
    return list(found.values())


@pytest.mark.parametrize(
    ("stage", "into"),
    [
        pytest.param(stage, into, marks=[] if (stage + into) % 3 == 0 else [pytest.mark.thorough])
        for stage in (0, 1, 2)
        for into in (0, 1, 2)
    ],
)
def test_a_resume_at_any_stage_ends_with_the_same_bits(tmp_path, unbroken, stage, into):
    at = first_steps(unbroken)[stage] + into
    run = make(tmp_path / "run")

    def on_row(row: Row) -> None:
        if row.step == at:
            raise CrashError

    with pytest.raises(CrashError):
        carry_out(run, Runtime(device="cpu", checkpoint_every=7), on_row=on_row)
    result = carry_out(run, Runtime(device="cpu", checkpoint_every=7))
    ended = weights(run)
    for name, weight in weights(unbroken).items():
        assert weight.equal(ended[name]), name
    untimed = [{**row, **UNTIMED} for row in run.read_metrics()]
    assert untimed == [{**row, **UNTIMED} for row in unbroken.read_metrics()]
    expected = unbroken.read_result()
    assert expected is not None
    assert result["rows"] == expected["rows"]
    assert [s["steps"] for s in result["stages"]] == [s["steps"] for s in expected["stages"]]


def test_the_result_names_its_stages(unbroken):
    result = unbroken.read_result()
    assert result is not None
    assert [stage["seq_len"] for stage in result["stages"]] == [8, 16, 32]
    assert sum(stage["steps"] for stage in result["stages"]) == 60
    assert all(stage["accuracy"] >= 0.55 for stage in result["stages"][:-1])
    assert result["rows"] == sum(s["steps"] * 256 // s["seq_len"] for s in result["stages"])

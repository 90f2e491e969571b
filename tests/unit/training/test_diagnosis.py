"""Why a run failed: a planted case of each kind, and cases on which each claim stays silent."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from analysis.base import Subject
from analysis.run.baselines import measure
from lab.api.results import describe_ending
from lab.config import ModelConfig, Runtime, TrainConfig
from lab.intervals import wilson
from lab.models import build
from lab.training.diagnosis import diagnose, progress, rates, rotary
from lab.training.diagnosis.failed_run import Answers, FailedRun, collect_answers
from lab.training.diagnosis.progress import look_whether_begun, look_whether_under_way
from lab.training.experiment import carry_out
from lab.training.loop import DivergedError, Row, start
from lab.training.records import find_ending, name_ending
from lab.training.run import Run
from tasks import TASKS
from tasks.base import Task

MQAR = TASKS["mqar"]
SMALL = MQAR(seq_len=16, vocab_size=64)


def make(path: Path, task: Task = SMALL, *, stack="AM*2", d_model=16, options=None, **train):
    values = {
        "batch_size": 8,
        "max_steps": 8,
        "eval_every": 4,
        "test_rows": 16,
        "precision": "fp32",
        **train,
    }
    model = ModelConfig(stack=stack, d_model=d_model, options=options or {})
    return Run(path, task, model, TrainConfig(**values))


def finish(run: Run) -> dict:
    return carry_out(run, Runtime(device="cpu", history=False))


def plant(run: Run, accuracies, *, loss=lambda step: 2.0, every: int = 10) -> FailedRun:
    """Return the run as if its evaluations had come out so; its weights are those it began with."""
    run.claim()
    with run.record_rows() as record:
        for step in range(1, every * len(accuracies) + 1):
            found = accuracies[step // every - 1] if step % every == 0 else None
            record(Row(step, run.task.seq_len, loss(step), 0.1, 3e-3, 1.0, 0.01, 0.01, 2.0, found))
    state = start(run.build(), run.train)
    state.step = every * len(accuracies)
    state.rows, state.precision = state.step * run.train.batch_size, "fp32"
    return FailedRun(run, state, None, "budget")


def fall(step: int) -> float:
    return 8.0 / step


def make_answers(accuracy: float, plateau: float = 0.25) -> Answers:
    return Answers(
        500, accuracy, wilson(accuracy, 500), 0.5, (0.48, 0.52), "context value", plateau
    )


def test_a_task_that_no_weights_solve(tmp_path):
    task = TASKS["word_problem"](group="Z2", seq_len=16)
    result = finish(make(tmp_path / "run", task))
    assert result["diagnosis"]["kind"] == "cannot"
    assert result["diagnosis"]["because"] == result["set_by_hand"]["because"]
    assert "why it is not solved, at rows of 16 tokens: cannot. " in describe_ending(result)


def test_a_bound_at_the_full_length_is_none_in_a_shorter_stage(tmp_path):
    """A state of 2 numbers holds two pairs of eight tokens, not those of 64."""
    run = make(
        tmp_path / "run",
        MQAR(seq_len=64, vocab_size=1024),
        stack="SN",
        d_model=2,
        options={"S.d_state": 2},
        lengthen=True,
        stage_steps=4,
    )
    result = finish(run)
    assert result["set_by_hand"]["verdict"] == "cannot"
    assert result["diagnosis"]["seq_len"] == 8
    assert result["diagnosis"]["kind"] != "cannot"


@pytest.mark.parametrize("base", [pytest.param(2.0, marks=pytest.mark.thorough), 10.0])
def test_a_rotation_too_fast_for_the_distances(tmp_path, base):
    task = MQAR(seq_len=64, vocab_size=256)
    ended = plant(make(tmp_path / "run", task, d_model=8, options={"A.rope_base": base}), [0.1])
    look = rotary.look(ended, 0.1)
    assert look.claims
    assert look.evidence["reached"] < 0.5
    # A run that does better than the codes refutes them.
    assert not rotary.look(ended, look.evidence["interval"][1] + 0.01).claims


@pytest.mark.parametrize(("seq_len", "d_model"), [(64, 8), (64, 64), (256, 16)])
def test_the_usual_rotation_forbids_nothing(tmp_path, seq_len, d_model):
    task = MQAR(seq_len=seq_len, vocab_size=2048)
    look = rotary.look(plant(make(tmp_path / "run", task, d_model=d_model), [0.1]), 0.1)
    assert not look.claims
    assert look.evidence["reached"] > 0.95


@pytest.mark.parametrize(
    ("stack", "options"),
    [
        ("AM SM", {"A.rope_base": 2.0, "S.position": "conv"}),
        ("AM*2", {"0.A.rope_base": 2.0, "1.A.position": "none"}),
        ("SM*2", {"S.position": "decay"}),
    ],
)
def test_a_layer_that_matches_without_rotation_ends_the_matter(stack, options):
    model = build(stack, vocab_size=64, d_model=8, options=options)
    assert rotary.list_rotations(model) == []


def test_state_space_layers_match_in_their_state():
    model = build("SM IM", vocab_size=64, d_model=8, n_heads=2, options={"S.d_state": 6})
    assert rotary.list_rotations(model) == [rotary.Rotation(1e4, 6, 1), rotary.Rotation(1e4, 4, 2)]


@pytest.mark.parametrize("name", [name for name in TASKS if name not in ("bytes",)])
def test_matching_is_asked_of_tasks_that_store_each_key_once(name):
    assert (rotary._find_places(TASKS[name]()) is not None) == (name in ("mqar", "overwrite"))


def test_a_diverged_run_names_its_rate(tmp_path):
    run = make(tmp_path / "run", learning_rate=1e30, optimizer="adamw", warmup_steps=0)
    with pytest.raises(DivergedError):
        finish(run)
    result = run.read_result()
    assert result is not None
    found = result["diagnosis"]
    assert found["kind"] == "outside the learning-rate window"
    assert found["because"] == "training diverged at step 2, at a learning rate of 1e+30"
    assert found["evidence"] == {"step": 2, "learning_rate": 1e30}


def test_a_rate_that_undoes_a_solution_is_too_high_and_a_lower_one_is_not(tmp_path):
    """From weights that solve the task, a high rate leaves them and a low one stays."""
    for rate, claims in ((0.1, True), (1e-4, False)):
        run = make(tmp_path / f"{rate}", d_model=64, init="oracle", learning_rate=rate)
        look = rates.look(plant(run, [0.9] * 80, loss=fall))
        assert look.claims == claims
        assert look.evidence["steps"] == rates.FEWEST
    assert "from the last weights, no learning rate near the run's 0.0001" in look.says


@pytest.mark.parametrize(("loss", "claims"), [(4.5, True), (0.5, False)])
def test_a_fresh_start_that_overtakes_the_whole_run_shows_its_rate(
    tmp_path, monkeypatch, loss, claims
):
    """What is planted is the loss that the run ended at: worse than any guess, or learned."""
    monkeypatch.setattr(rates, "FACTORS", (1 / 3,))
    task = MQAR(seq_len=8, vocab_size=32)
    run = make(
        tmp_path / "run", task, stack="AN", optimizer="adamw", learning_rate=0.03, warmup_steps=0
    )
    look = rates.look(plant(run, [0.1] * 18, loss=lambda step: loss, every=100))
    assert look.claims == claims
    assert look.evidence["steps afresh"] == rates.FEWEST_AFRESH
    if claims:
        assert look.says.startswith("from the start, 100 steps at a learning rate of 0.01 reach a")


def test_a_healthy_run_cut_short_is_not_blamed_on_its_rate(tmp_path, monkeypatch):
    monkeypatch.setattr(rates, "SHARE", 0.4)
    run = make(tmp_path / "run", max_steps=240, d_model=32, batch_size=16, eval_every=24)
    found = finish(run)["diagnosis"]
    assert found["kind"] in ("under way", "not begun", "undecided")
    look = rates.look(FailedRun(run, run.load_state(), None, "budget"))
    assert not look.claims
    assert look.evidence["steps"] >= rates.FEWEST


def test_a_run_whose_loss_has_hardly_fallen_is_looked_at_for_longer(tmp_path, monkeypatch):
    monkeypatch.setattr(rates, "STEPS", rates.FEWEST)
    monkeypatch.setattr(rates, "FEWEST_AFRESH", 10)
    monkeypatch.setattr(rates, "_train_at_rate", lambda *given: [2.0, 2.1] * (given[-1] // 2))
    still = rates.look(plant(make(tmp_path / "still", warmup_steps=0), [0.1] * 36))
    assert (still.evidence["steps"], still.evidence["steps afresh"]) == (20, 10)
    falling = rates.look(plant(make(tmp_path / "falling"), [0.1] * 36, loss=fall))
    assert falling.says == "other learning rates are tried after 800 steps or more"


def test_rows_that_rise_say_how_many_are_missing(tmp_path):
    rising = [0.25 + 0.05 * i for i in range(12)]
    look = look_whether_under_way(plant(make(tmp_path / "run"), rising), make_answers(0.8))
    assert look.claims
    low, high = look.evidence["rows needed interval"]
    assert 0 < low <= look.evidence["rows needed"] <= high


def test_rows_that_have_risen_far_enough_are_not_said_to_miss_some(tmp_path):
    risen = [0.4 + 0.05 * i for i in range(12)] + [0.995]
    look = look_whether_under_way(plant(make(tmp_path / "run"), risen), make_answers(0.99))
    assert look.claims
    assert "rose to 0.995, which is enough" in look.says


ROWS = 80.0 * np.arange(1, 13)


def test_the_extrapolation_of_a_logistic_curve_in_the_rows():
    """The logit rises by 2 in 960 rows and has 3.6 to go: half of them are expected."""
    logits = ROWS / 480 - 1
    needed, least, most = progress.extrapolate(ROWS, 1 / (1 + np.exp(-logits)), 0.99)
    line = 480 * (np.log(99) - logits[-2:].mean())
    assert (needed, least) == pytest.approx((line / 2, line / 4))
    assert least < line < most


def test_a_curve_that_slows_down_lies_within_the_interval():
    """With logit = ln(rows / 500), 0.99 takes 99 × 500 rows, and 12 × 80 are seen."""
    _, _, most = progress.extrapolate(ROWS, ROWS / (ROWS + 500), 0.99)
    assert most == pytest.approx(99 * 500 - 960)


def test_a_fall_at_the_end_has_no_upper_bound():
    accuracy = np.append(np.linspace(0.2, 0.9, 10), [0.5, 0.3])
    _, _, most = progress.extrapolate(ROWS, accuracy, 0.99)
    assert most == progress.FARTHEST * ROWS[-1]


@pytest.mark.parametrize("seed", range(5))
def test_a_flat_accuracy_is_not_under_way(tmp_path, seed):
    noise = torch.randn(40, generator=torch.Generator().manual_seed(seed)) * 0.02
    ended = plant(make(tmp_path / "run"), (0.6 + noise).tolist(), every=2)
    assert not look_whether_under_way(ended, make_answers(0.6)).claims


def test_a_rise_below_what_needs_no_recall_is_not_under_way(tmp_path):
    ended = plant(make(tmp_path / "run"), [0.02 * i for i in range(1, 12)])
    assert not look_whether_under_way(ended, make_answers(0.22)).claims


@pytest.mark.parametrize(
    ("stage", "accuracy", "unlearned", "stopped", "said"),
    [
        (1, 0.8, "stop", "budget", "lab resume {} --max-steps 16` trains on"),
        (1, 0.8, "stop", "interrupted", "lab resume {}` trains on"),
        (1, 0.8, "lengthen", "budget", ""),
        (1, 0.25, "stop", "budget", ""),
        (0, 0.8, "stop", "budget", ""),
    ],
)
def test_a_stage_that_has_just_begun_asks_for_more_steps(
    tmp_path, stage, accuracy, unlearned, stopped, said
):
    run = make(tmp_path / "run", MQAR(seq_len=32, vocab_size=64), lengthen=True, start_len=16)
    run = replace(run, train=replace(run.train, unlearned=unlearned))
    ended = replace(plant(run, [accuracy] * 3, every=2), stopped=stopped)
    ended.state.stage = stage
    look = look_whether_under_way(ended, make_answers(accuracy))
    assert look.claims == bool(said)
    if said:
        assert look.says.startswith("rows of this length came in the last 6 steps alone, after")
        assert look.says.endswith(said.format(run.path))


def test_a_plateau_has_not_begun(tmp_path):
    ended = plant(make(tmp_path / "run"), [0.25] * 12, loss=lambda step: 2.0 - 1e-4 * step)
    look = look_whether_begun(ended, make_answers(0.25))
    assert look.claims
    assert look.evidence["change of loss"] / look.evidence["over steps"] == pytest.approx(-1e-4)
    assert look.says.endswith("so more steps may be all it needs")
    assert look.says.startswith("after 120 steps, accuracy")
    below = look_whether_begun(ended, make_answers(0.15))
    assert below.says.endswith("but this promises no recall: it has yet to learn what needs none")
    # Level, a fall that fp32 cannot show, and one of which no digit is printed.
    for fall in (0.0, 1e-15, 1e-10, 5e-6):
        level = plant(
            make(tmp_path / f"{fall}"), [0.25] * 12, loss=lambda step, fall=fall: 2 - fall * step
        )
        assert look_whether_begun(level, make_answers(0.25)).says.endswith("± 0.000 nats")
    alone = plant(make(tmp_path / "alone"), [0.0], every=1)
    assert look_whether_begun(alone, make_answers(0.0)).says.startswith("after 1 step, accuracy")
    assert not look_whether_begun(ended, make_answers(0.35)).claims
    for low, said in ((0.505, ", which may be luck"), (0.53, "), more often than by")):
        found = {"outranks": low + 0.02, "outranks_interval": (low, low + 0.04)}
        assert said in look_whether_begun(ended, replace(make_answers(0.25), **found)).says


def test_an_untrained_model_ranks_answers_by_chance_and_a_solved_one_rightly(tmp_path):
    for init, least, most in (("random", 0.4, 0.6), ("oracle", 1.0, 1.0)):
        run = make(tmp_path / init, d_model=64, init=init)
        found = collect_answers(plant(run, [0.1]))
        assert found.outranks is not None
        assert least <= found.outranks <= most
        assert found.rule in ("context value", "position only")
        assert 0.2 < found.plateau < 0.4
    assert found.accuracy == 1


def test_it_names_the_accuracy_that_training_showed(tmp_path):
    """Its rows are those of the last evaluation, or more, which it then counts."""
    run = make(tmp_path / "run", eval_every=8, batch_size=32, test_rows=1024)
    because = finish(run)["diagnosis"]["because"]
    shown = run.read_metrics()[-1].get("validation_accuracy")
    assert because.startswith(f"after 8 steps, accuracy on 128 validation rows is {shown:.3f} (")


def test_a_run_of_few_steps_has_not_begun_and_the_report_says_so(tmp_path):
    run = make(tmp_path / "run")
    result = finish(run)
    found = result["diagnosis"]
    assert found["kind"] == "not begun"
    assert found["seq_len"] == 16
    because = found["because"]
    assert f"not begun. {because[0].upper()}{because[1:]}" in describe_ending(result)
    failure = measure(Subject.of(run))[0].failure
    assert "Why it is not solved, at rows of 16 tokens: not begun. After 8 steps," in failure


def test_a_solved_run_has_no_diagnosis(tmp_path):
    result = finish(make(tmp_path / "run", d_model=64, init="oracle"))
    assert result["accuracy"] == 1
    assert result["diagnosis"] is None


def test_looking_changes_nothing(tmp_path):
    ended = plant(make(tmp_path / "run", stack="AN", d_model=8), [0.1] * 80)
    before = copy.deepcopy(ended.state.model.state_dict())
    drawn = torch.random.get_rng_state()
    found = diagnose(ended.run, ended.state, stopped="budget", accuracy=0.1, by_hand=None)
    assert found is not None
    json.dumps(found.evidence, allow_nan=False)
    assert all(value.equal(before[name]) for name, value in ended.state.model.state_dict().items())
    assert torch.random.get_rng_state().equal(drawn)
    assert ended.state.step == 800


@pytest.mark.parametrize(
    ("result", "ending"),
    [
        (None, "unfinished"),
        ({"stopped": "solved", "signal": None}, "solved"),
        ({"stopped": "interrupted", "signal": "SIGINT"}, "interrupted"),
        ({"stopped": "interrupted", "signal": None}, "not solved: time limit reached"),
    ],
)
def test_minutes_and_signals_end_a_run_in_words_of_their_own(result, ending):
    assert name_ending(find_ending(result)) == ending

"""The benchmarks compare like with like: both sides do the same work."""

import json
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from lab.bench import BENCHMARKS, ON_GPU, attention, delta, experts, rows, scaling, ssd, step
from lab.bench.ratio import Contest, Ratio
from lab.cli.app import app
from lab.models import build
from lab.peers import MissingPeerError
from tasks import TASKS
from tasks.mqar import MQAR

LINE = Ratio("thing", 2.0, 1.0, "ms", 0.5, None)


def test_the_usual_step_computes_the_same_logits():
    model = build("AM*2", vocab_size=64, d_model=16)
    tokens = MQAR(seq_len=16, vocab_size=64).batch(size=3).inputs
    torch.testing.assert_close(
        step.compute_usual_logits(model, tokens), model(tokens), rtol=1e-5, atol=1e-5
    )


def test_the_usual_generator_draws_rows_that_our_oracle_answers():
    state = np.random.get_state()  # noqa: NPY002
    np.random.seed(0)  # noqa: NPY002
    inputs, targets = rows.draw_usual_rows(rows.TASK, 2)
    np.random.set_state(state)  # noqa: NPY002
    assert inputs.shape == targets.shape == (2, 2048)
    scored = targets != -100
    assert scored.sum(1).tolist() == [512, 512]
    batch = rows.TASK.batch(size=1)
    answers = rows.TASK.oracle(type(batch)(inputs, targets, batch.roles.expand(2, -1), {}))
    assert torch.equal(answers[scored], targets[scored])


@pytest.fixture
def once(monkeypatch):
    """Do each side of a pair once, in place of measuring it; return the results by name."""
    done = {}

    def measure(pair: Contest, repeats: int = 7):
        done[pair.name] = pair.ours()(), pair.theirs()()
        yield Ratio(pair.name, 1.0, 1.0, "ms", 1.0, pair.promised)

    monkeypatch.setattr(Contest, "measure", measure)
    return done


def test_rows_of_every_task_are_timed_at_both_sizes(once, monkeypatch):
    monkeypatch.setattr(rows, "ROWS", 32)
    monkeypatch.setattr(
        rows, "time_in_turns", lambda ours, theirs: (ours(), theirs(), 1.0, 2.0)[2:]
    )
    found = list(rows.measure())
    assert len(once) == 3
    growth = found[3:]
    assert {line.name.split(",")[0] for line in growth} == set(TASKS)
    # Twice the time for four times the tokens, and for sixteen times the vocabulary.
    assert {line.ratio for line in growth} == {2.0, 0.5}


def test_attention_with_and_without_a_mask_is_timed_both_ways(once, monkeypatch):
    monkeypatch.setattr(attention, "SEQ_LEN", 16)
    monkeypatch.setattr(attention, "SHAPES", ((2, 4),))
    assert len(list(attention.measure())) == len(once) == 12
    forward = {name: pair for name, pair in once.items() if "backward" not in name}
    for name, (ours, theirs) in forward.items():
        assert ours.shape == theirs.shape
        assert not torch.equal(ours, theirs), name


def test_every_form_of_ssd_computes_the_same_gradients(once, monkeypatch):
    for name, size in {"SEQ_LEN": 64, "CHUNK_LENS": (16,), "HEAD_DIM": 16, "STATE": 16}.items():
        monkeypatch.setattr(ssd, name, size)
    assert len(list(ssd.measure())) == 2 * len(ssd.FORMS)
    for name, pair in once.items():
        for ours, theirs in zip(*pair, strict=True):
            assert (ours - theirs).abs().max() <= 1e-3 * theirs.abs().max(), name


def test_every_form_of_the_delta_rule_computes_the_same_gradients(once, monkeypatch):
    monkeypatch.setattr(delta, "SEQ_LEN", 64)
    monkeypatch.setattr(delta, "ROWS", (1, 2))
    lengths, cases = len(delta.CHUNK_LENS), len(delta.FLA)
    assert len(list(delta.measure())) == (3 + lengths * cases) + (2 + lengths * (cases - 1))
    same = {name: pair for name, pair in once.items() if "rule against state space" not in name}
    assert len(same) == len(once) - 2
    for name, pair in same.items():
        for ours, theirs in zip(*pair, strict=True):
            assert (ours - theirs).abs().max() <= 1e-3 * theirs.abs().max(), name


def test_steps_and_experts_run_on_both_sides(once, monkeypatch):
    monkeypatch.setattr(step, "SETTINGS", ((16, 4, 2, 1.0),))
    monkeypatch.setattr(step, "VOCAB_SIZE", 64)
    monkeypatch.setattr(step, "_choose_setting", lambda *sizes: step.StepTime("fp32", 1, 0.0))
    for name, size in {"TOKENS": 8, "D_MODEL": 16, "N_EXPERTS": 64, "D_RETRIEVAL": 16}.items():
        monkeypatch.setattr(experts, name, size)
    monkeypatch.setattr(experts, "K", 4)
    names = [line.name for line in (*step.measure(), *experts.measure())]
    assert [*once] == names
    assert len(names) == 1 + len(step.STACKS) + 2


def test_every_axis_changes_its_size(monkeypatch):
    small = {"seq_len": 64, "n_pairs": 4, "vocab_size": 256, "d_model": 16, "rows": 2}
    smaller = {"seq_len": 16, "vocab_size": 16, "d_model": 4}
    axes = [
        (
            name,
            bound,
            [{k: _shrink(v, smaller.get(k, 1)) for k, v in c.items()} for c in changes[:2]],
        )
        for name, bound, changes in scaling.AXES
    ]
    monkeypatch.setattr(scaling, "BASE", scaling.BASE | small)
    monkeypatch.setattr(scaling, "REPEATS", 1)
    monkeypatch.setattr(scaling, "AXES", axes)
    for line in scaling.measure():
        memory = line.note.split("memory ")[1].split(" MiB")[0].split(" to ")
        # More of anything takes more memory, so the size did reach the model or its rows.
        assert float(memory[0]) < float(memory[1]), line.name


def _shrink(value: Any, times: int) -> Any:
    return value // times if times > 1 else value


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_is_its_power(power):
    sizes = (16, 32, 64, 128)
    assert scaling.fit_exponent(sizes, [3 * n**power for n in sizes]) == pytest.approx(power)


@pytest.mark.parametrize(
    ("ratio", "target", "reached"), [(2.0, 2.0, True), (1.9, 2.0, False), (0.1, None, True)]
)
def test_a_missed_promise_says_so(ratio, target, reached):
    line = Ratio("thing", 2.0, 1.0, "rows/s", ratio, target)
    assert line.reached == reached
    assert ("MISSED" in str(line)) == (not reached)


def test_the_command_prints_lines_tables_and_json(monkeypatch):
    monkeypatch.setattr(scaling, "measure", lambda: [LINE])
    words = ["bench", "--only", "scaling"]
    assert CliRunner().invoke(app, words).stdout == f"{LINE}\n"
    machine, _, header, rule, row = (
        CliRunner().invoke(app, [*words, "--markdown"]).stdout.split("\n")[:5]
    )
    assert "torch" in machine
    assert header.count("|") == rule.count("|") == 8
    assert row == LINE.to_markdown()
    assert json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["name"] == "thing"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--only rows --only gpu", "only=gpu: needs a GPU, and this machine has none"),
        ("--only rows --json --markdown", "--json and --markdown: choose one"),
        ("--only row", "Did you mean rows?"),
    ],
)
def test_the_command_refuses(monkeypatch, words, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused = CliRunner().invoke(app, ["bench", *words.split()])
    assert refused.exit_code == 2
    assert message in refused.stderr


@pytest.mark.parametrize("gpu", [False, True])
def test_without_a_gpu_the_command_names_what_it_leaves_out(monkeypatch, gpu):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    measured = []
    for name in BENCHMARKS:
        module = import_module(f"lab.bench.{name}")
        monkeypatch.setattr(module, "measure", lambda name=name: measured.append(name) or [])
    found = CliRunner().invoke(app, ["bench"])
    assert measured == [name for name in BENCHMARKS if gpu or name not in ON_GPU]
    assert ("left out: gpu" in found.stderr) == (not gpu)


def test_what_was_measured_before_a_missing_package_is_printed(monkeypatch):
    def measure():
        yield LINE
        raise MissingPeerError("fla is not installed")

    monkeypatch.setattr(ssd, "measure", measure)
    found = CliRunner().invoke(app, ["bench", "--only", "ssd"])
    assert found.exit_code == 2
    assert "thing" in found.stdout
    assert "fla is not installed" in found.stderr

"""Repeat the token of a few positions ago.

The task, mixer, analysis and law that these tests add, each in one place, work wherever the lab's
own do. This docstring's first paragraph is the help of the task's command.
"""

import math
import sys
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import lab
import tasks
from analysis import ANALYSES, READ_VECTORS
from analysis.base import Finding, Subject, Table
from analysis.examination import examine, record
from analysis.figures import Axis, Bars, bars
from analysis.interventions import block_edges, edit_matrix, swap_values
from analysis.mixing import collect_mixers
from analysis.pages.report import render
from analysis.run.trajectories import choose_stretches
from analysis.scoring import scored
from lab.cli.app import app
from lab.config import ModelConfig, TrainConfig
from lab.hooks import HookPoint
from lab.laws import LAWS, Law, Verdict, assert_lawful, certify
from lab.layers.mixer import MatrixMixer, RotaryPairs
from lab.models import build
from lab.ops.rope import rotate
from lab.suite.audit import audit
from lab.training.run import Run
from tasks import TASKS, counter
from tasks.base import IGNORE, Batch, Preset, Task
from tasks.bounds import option
from tasks.mqar import MQAR
from tasks.vectors import VectorTask

MODEL = f"{__name__}:LinearAttention"
TASK = MQAR(seq_len=16, vocab_size=32, n_pairs=2)


class LinearAttention(nn.Module):
    """Causal attention without a softmax: y_t = Σ_{s≤t} (q_t·k_s) v_s, q and k rotated."""

    matrix_form = "QKᵀ, lower triangle"

    def __init__(self, d_model: int, n_heads: int = 1):
        super().__init__()
        self.n_heads, self.asked = n_heads, []
        self.q, self.k, self.v, self.out = (nn.Linear(d_model, d_model) for _ in range(4))
        self.hook_q, self.hook_k = HookPoint(), HookPoint()

    @property
    def rotary_pairs(self) -> RotaryPairs:
        heads, width = tuple(range(self.n_heads)), self.q.out_features // self.n_heads
        hooks = ("hook_q", "hook_k", None)
        return RotaryPairs("Q/K", *hooks, heads, heads, width // 2, 10000.0, "half", 1.0)

    def forward(self, x):
        q, k = self._rotate(x)
        state = torch.einsum("bshn,bhsp->bshnp", k, self.values(x)).cumsum(1)
        return self.project(x, torch.einsum("bthn,bthnp->bhtp", q, state))

    def matrix(self, x, rows: slice | None = None):
        self.asked.append(rows)
        q, k = self._rotate(x)
        whole = torch.einsum("bthn,bshn->bhts", q, k).tril()
        return whole if rows is None else whole[:, :, rows]

    def values(self, x):
        return self.v(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

    def project(self, x, z):
        return self.out(z.transpose(1, 2).flatten(2))

    def _rotate(self, x):
        q, k = (f(x).unflatten(-1, (self.n_heads, -1)) for f in (self.q, self.k))
        places = torch.arange(x.shape[1])
        return rotate(self.hook_q(q), places), rotate(self.hook_k(k), places)


def subject(**options) -> Subject:
    model = build("UM", vocab_size=32, d_model=16, n_heads=2, model=MODEL, **options).eval()
    return Subject(TASK, model, TASK.batch(split="test", size=4))


def test_a_mixer_is_met_by_rows_of_its_matrix(monkeypatch):
    monkeypatch.setattr("analysis.mixing.BLOCK_ENTRIES", 64)
    given = subject()
    [mixer] = collect_mixers(given.model, given.batch)
    assert isinstance(mixer.module, MatrixMixer)
    assert mixer.module.takes_rows
    assert (mixer.kind, mixer.form) == ("LinearAttention", "QKᵀ, lower triangle")
    blocks = list(mixer.blocks(0))
    assert len(blocks) > 1
    assert isinstance(mixer.module, LinearAttention)
    assert None not in mixer.module.asked
    torch.testing.assert_close(torch.cat([b for _, b in blocks], 1), mixer.matrix(0))
    assert len(choose_stretches(mixer, 2**14)) > 1


def test_a_mixer_is_analysed_by_what_it_offers():
    found = examine(subject(), ("matrices", "heads", "rollout", "frequencies", "mechanism"))
    assert all(found.results.values())
    numbers = record(found)["analyses"]
    assert numbers["matrices"][0]["form"] == "QKᵀ, lower triangle"
    assert "Q/K" in str(numbers["frequencies"])


@torch.no_grad()
def test_a_mixers_matrix_can_be_edited():
    given = subject()
    before = scored(given.model, given.batch).losses
    for same in (
        edit_matrix(given.model, 0, lambda matrix, rows: matrix),
        block_edges(given.model, 0, [], []),
        swap_values(given.model, 0, [3] * 4, [3] * 4),
    ):
        with same:
            torch.testing.assert_close(scored(given.model, given.batch).losses, before)
    [mixer] = collect_mixers(given.model, given.batch)
    module, x = mixer.module, mixer.x
    assert isinstance(module, LinearAttention)
    matrix = module.matrix(x)
    matrix[:, :, 9, 2] = 0
    edited = module.project(x, matrix @ module.values(x))
    with block_edges(given.model, 0, [9], [2]):
        torch.testing.assert_close(module(x), edited)


@dataclass(frozen=True, kw_only=True)
class Echo(Task):
    """Repeat the token of `lag` positions ago."""

    name: ClassVar[str] = "echo"
    role_names: ClassVar[tuple[str, ...]] = ("token",)
    separates: ClassVar[str] = "a fixed distance"
    presets: ClassVar = {"small": Preset({}, "the test")}
    seq_len: int = option(12, "tokens per row")
    vocab_size: int = option(8, "tokens there are")
    lag: int = option(2, "positions back")

    def validate(self) -> None:
        if not 1 <= self.lag < self.seq_len:
            raise ValueError(f"lag={self.lag}: must be ≥ 1 and < {self.seq_len}")

    def generate(self, split, numbers, seed) -> Batch:
        words = self.draw_words(split, numbers, seed, self.seq_len)
        inputs = counter.draw_below(words, self.vocab_size)
        targets = torch.full_like(inputs, IGNORE)
        targets[:, self.lag :] = inputs[:, : -self.lag]
        return Batch(inputs, targets, torch.zeros_like(inputs), {})

    def oracle(self, batch: Batch) -> torch.Tensor:
        rows = [[IGNORE] * self.lag + row[: -self.lag] for row in batch.inputs.tolist()]
        return torch.tensor(rows)

    @property
    def chance(self) -> float:
        return 1 / self.vocab_size

    def shortcuts(self):
        return {}


def test_a_task_needs_its_class_and_a_line(monkeypatch):
    monkeypatch.setitem(tasks._HOMES, "echo", f"{__name__}:Echo")
    assert TASKS["echo"] is Echo
    run = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"}).invoke
    assert "Repeat the token of a few positions ago" in run(app, ["--help"]).output
    assert "positions back" in run(app, ["echo", "--help"]).output
    shown = run(app, ["echo", "--lag", "3", "--show", "1"])
    assert "row 0" in shown.output, shown.output
    refused = run(app, ["echo", "--lag", "12", "--show", "1"])
    assert (refused.exit_code, "lag=12: must be ≥ 1 and < 12" in refused.output) == (2, True)
    assert audit(Echo()).sound


@dataclass(frozen=True, kw_only=True)
class Rotation(VectorTask):
    """Predict where a point is next that turns about 0 by an angle that only the row shows."""

    name: ClassVar[str] = "rotation"
    role_names: ClassVar[tuple[str, ...]] = ("point",)
    separates: ClassVar[str] = "a linear map from its examples"
    presets: ClassVar = {"small": Preset({}, "the test")}
    seq_len: int = option(12, "points per row")

    @property
    def d_input(self) -> int:
        return 2

    @property
    def d_output(self) -> int:
        return 2

    def validate(self) -> None:
        if self.seq_len < 3:
            raise ValueError(f"seq_len={self.seq_len}: must be ≥ 3")

    def generate(self, split, numbers, seed) -> Batch:
        words = self.draw_words(split, numbers, seed, 2)
        start, turn = (counter.draw_below(words, 360).double() * math.pi / 180).unbind(1)
        angle = start[:, None] + turn[:, None] * torch.arange(self.seq_len + 1)
        points = torch.stack([angle.cos(), angle.sin()], 2).float()
        inputs, targets = points[:, :-1], points[:, 1:].clone()
        targets[:, 0] = torch.nan  # one point does not show the angle
        return Batch(inputs, targets, torch.zeros(inputs.shape[:2], dtype=torch.int64), {})

    def oracle(self, batch: Batch) -> torch.Tensor:
        point = torch.view_as_complex(batch.inputs.double())
        answers = torch.full_like(point, complex(math.nan, math.nan))
        answers[:, 1:] = point[:, 1:] ** 2 / point[:, :-1]
        return torch.view_as_real(answers).float()

    def shortcuts(self):
        return {"last token": lambda batch: batch.inputs}


def test_a_task_of_vectors_needs_its_class_and_a_line(monkeypatch, tmp_path):
    monkeypatch.setitem(tasks._HOMES, "rotation", f"{__name__}:Rotation")
    run = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"}).invoke
    shown = run(app, ["rotation", "--show", "1"])
    assert "row 0 of train, seed 0: 12 tokens, 11 scored" in shown.output, shown.output
    audited = audit(Rotation())
    assert audited.sound
    assert [(score.name, score.accuracy) for score in audited.scores][-1] == ("oracle", 1.0)
    settings = {"steps": 40, "d_model": 16, "batch_size": 32, "eval_every": 20, "lengthen": False}
    trained = lab.train(
        "rotation", out=tmp_path / "run", **settings, test_rows=64, precision="fp32", threads=1
    )
    assert trained.result["perplexity"] is trained.result["diagnosis"] is None
    assert "bits_per_token" not in trained.result
    again = lab.open(tmp_path / "run")
    assert again.task == Rotation()
    batch = again.task.batch(split="test", size=64)
    with torch.no_grad():
        error = (again.model(batch.inputs) - batch.targets)[batch.scored].square().mean().item()
    mean = batch.targets[batch.scored].square().mean().item()
    assert error == pytest.approx(trained.result["loss"], rel=1e-3)
    assert trained.accuracy == pytest.approx(max(0.0, 1 - error / mean), abs=1e-4)
    found = again.analyze()
    assert {"curves", "positions", "matrices"} <= set(found) <= {*READ_VECTORS}
    assert found.examination.not_applicable["mechanism"] == (
        "rows of rotation are vectors, not tokens"
    )
    page = again.report().content
    assert "of what the oracle explains is explained" in page
    assert "test explained variance" in page
    assert "accuracy is" not in page


@dataclass(frozen=True)
class TokenCount(Finding):
    """How many tokens were looked at."""

    title = "Tokens"
    reading = "A bar for all tokens."
    tokens: int

    @property
    def says(self) -> str:
        return f"Tokens that were counted: {self.tokens}."

    def numbers(self) -> Table:
        return Table(("what", "count"), (("tokens", str(self.tokens)),))

    def figure(self) -> go.Figure:
        return bars(["tokens"], [Bars("count", np.array([self.tokens]))], Axis("count", "count"))


def measure(subject: Subject) -> list[TokenCount]:
    return [TokenCount(subject.batch.inputs.numel())]


TITLE = "An analysis that a test adds"


def test_an_analysis_needs_its_module_and_a_line(monkeypatch, tmp_path):
    monkeypatch.setitem(ANALYSES, "counted", sys.modules[__name__])
    run = Run(tmp_path / "run", TASK, ModelConfig(stack="AM", d_model=8), TrainConfig(max_steps=4))
    run.claim()
    found = examine(Subject.of(run, step=0, rows=2), ("counted",))
    page = render(run, found)
    assert TITLE in page
    assert "Tokens that were counted: 32." in page
    assert record(found)["analyses"]["counted"] == [
        {"title": "Tokens", "says": "Tokens that were counted: 32.", "tokens": 32}
    ]
    with pytest.raises(ValueError, match=r"only=lost: is not an analysis. Known: .*counted"):
        examine(Subject.of(run, step=0, rows=2), ("lost",))


def test_a_law_needs_its_judge_and_a_line(monkeypatch):
    def judge(module, probes) -> Verdict:
        largest = module(probes.input(8)).abs().max().item()
        outcome = "holds" if largest < 1e3 else "fails"
        return Verdict("bounded", outcome, f"largest output {largest:.2g}")

    monkeypatch.setitem(LAWS, "bounded", Law("bounded", judge))
    assert "bounded" in [verdict.law for verdict in certify(nn.Identity(), d_model=4, lengths=(2,))]
    mixer = LinearAttention(8, 2)
    assert_lawful(mixer, 8, (8,), laws=["matrix applies", "bounded"])
    with torch.no_grad():
        mixer.out.bias.fill_(1e4)
    with pytest.raises(AssertionError, match="bounded fails"):
        assert_lawful(mixer, 8, (8,), laws=["bounded"])

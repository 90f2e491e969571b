"""Rows laid out: counts against loops, cells where they belong, what users write escaped."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

from analysis import rows
from analysis.plain import to_plain
from analysis.rows import LINES, RowLayout, lay_out
from tasks.copying import Copy
from tasks.induction import Induction
from tasks.mqar import MQAR
from tasks.word_problem import WordProblem


def traces(found: RowLayout) -> Any:
    """Return what a figure is made of."""
    return found.figure().data


def cells(found: RowLayout) -> Any:
    """Return the heat map of a figure."""
    (shown,) = (trace for trace in traces(found) if isinstance(trace, go.Heatmap))
    return shown


def test_roles_and_scored_positions_are_counted_over_all_rows():
    task = Copy(seq_len=16)
    batch = task.batch(split="test", size=20)
    found = lay_out(task, batch)
    roles = batch.roles.flatten().tolist()
    scored = [r for r, t in zip(roles, batch.targets.flatten().tolist(), strict=True) if t != -100]
    assert found.a_row.tolist() == [roles.count(i) / 20 for i in range(5)]
    assert found.scored_roles.tolist() == [scored.count(i) / 20 for i in range(5)]
    assert found.scored == len(scored) / 20
    assert found.title == "Rows of copy: the first 8 of 20"


@pytest.mark.parametrize(("seq_len", "width", "lines"), [(16, 16, 1), (200, 64, 4), (1000, 128, 8)])
def test_a_long_row_goes_on_in_the_next_line(seq_len, width, lines):
    task = MQAR(seq_len=seq_len, vocab_size=2048)
    batch = task.batch(split="test", size=8)
    found = lay_out(task, batch)
    assert (found.width, len(found.roles)) == (width, min(8, LINES // lines))
    shown, pitch = cells(found), lines + (lines > 1)
    for row in range(len(found.roles)):
        for position in range(0, seq_len, 7):
            line, column = row * pitch + position // width, position % width
            assert shown.z[line][column] == batch.roles[row, position]
            note = shown.customdata[line][column]
            assert note.startswith(f"row {row}, position {position}: {batch.inputs[row, position]}")
            target = int(batch.targets[row, position])
            assert note.endswith(f"right: {target}") == (target != -100)
    scored = next(trace for trace in traces(found) if trace.name == "scored")
    assert len(scored.x) == 3 * int((batch.targets[: len(found.roles)] != -100).sum())


def test_a_row_beyond_the_room_is_cut_where_nothing_is_asked():
    task = Induction(seq_len=20_000)
    found = lay_out(task, task.batch(split="test", size=2))
    assert (found.first, found.roles.shape) == (20_000 - 8192, (1, 8192))
    assert found.answers[0][-1]
    assert found.title.endswith("the first 1 of 2, positions 11,808 to 19,999")
    batch = task.batch(split="test", size=1)
    targets = torch.full_like(batch.targets, -100)
    targets[0, 12_000] = 3
    assert lay_out(task, replace(batch, targets=targets)).first == 12_001 - 8192
    targets[0, 12_000], targets[0, 5] = -100, 3
    assert lay_out(task, replace(batch, targets=targets)).first == 0


def test_the_longest_published_rows_make_a_small_figure():
    task = MQAR(seq_len=2048, n_pairs=512, vocab_size=8192)
    found = lay_out(task, task.batch(split="test", size=8))
    assert len(found.figure().to_json() or "") < 2**20
    assert len(json.dumps(to_plain(found))) < 1000


def test_tokens_stand_in_their_cells_where_there_is_room():
    task = WordProblem(group="Z2", seq_len=8)
    shown = cells(lay_out(task, task.batch(size=2)))
    assert shown.text.tolist() == [
        [str(t) for t in row] for row in task.batch(size=2).inputs.tolist()
    ]
    task = MQAR(seq_len=64)
    assert cells(lay_out(task, task.batch(size=2))).text is None


def test_what_a_token_looks_like_is_no_markup():
    found = RowLayout(
        2, ("<i>", "rest"), np.ones(2), 1.0, np.array([1.0, 0.0]), 0, 2,
        np.array([[0, 1]]), (("<b>", "&"),), (("<s>", ""),), "",
    )  # fmt: skip
    text = found.figure().to_json()
    assert text is not None
    for wrong in ("<b>", "<s>", "<i>"):
        assert wrong not in json.loads(text).__repr__()


def test_answers_beside_a_row_are_cut_where_there_is_no_room():
    fit = ("ab", "", "c" * (rows.BESIDE - 3))
    assert rows._shorten_answers(fit) == f"ab {fit[2]}"
    assert rows._shorten_answers((*fit, "d")) == f"ab {fit[2]} …"
    long = "c" * (rows.BESIDE + 1)
    assert rows._shorten_answers((long, "d")) == f"{long} …"

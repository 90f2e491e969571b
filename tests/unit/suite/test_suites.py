"""Published suites: their tables, the runs they make, what they refuse."""

from typing import get_args

import pytest

from lab.api.settings import read_settings
from lab.api.sweep_settings import build_suite
from lab.suite.suites import SuiteName, read_suite

SIZES = {"mad": (6, 5), "cogscale": (14, 6), "kimi": (3, 3), "zoology": (11, 8)}
"""Tasks of each suite, and those that the lab has."""


@pytest.mark.parametrize("name", get_args(SuiteName))
def test_each_task_of_a_suite_can_be_run_or_says_why_not(name: str):
    suite = read_suite(name)
    total, known = SIZES[name]
    assert len(suite.entries) == total
    assert len(suite.known) == known
    for entry in suite.entries:
        assert all(0 <= share <= 1 for share in entry.published.values())
        if not entry.known:
            assert entry.task or entry.note
            continue
        run, _ = read_settings(entry.task, dict(entry.options))
        for length in entry.lengths:
            assert run.task.resize(length).seq_len == length


def test_the_sweep_of_a_suite_has_a_run_of_each_task_that_the_lab_has():
    suite = read_suite("mad")
    built = build_suite(suite, {"d_model": [16, 32]}, {"max_steps": 5}, seeds=[7])
    assert built.factors == ("task", "d_model", "seed")
    assert len(built.cells) == 2 * len(suite.known)
    cell = built.cells[0]
    assert cell.name == "task=in-context_recall,d_model=16,seed=7"
    assert (cell.task, cell.lengths) == ("mqar", (128,))
    wanted = {**suite.entries[0].options, "max_steps": 5, "d_model": 16, "seed": 7}
    assert {**cell.options, "precision": "fp32"} == {**wanted, "precision": "fp32"}
    kimi = build_suite(read_suite("kimi"), {}, {}, seeds=[0])
    assert all(cell.lengths == (256, 512, 1024, 2048) for cell in kimi.cells)


@pytest.mark.parametrize("given", [{"seq_len": 8}, {"power": 0.1}])
def test_sizes_are_those_of_the_suite(given):
    with pytest.raises(ValueError, match=f"{next(iter(given))}: is set by the suite mad, for in-"):
        build_suite(read_suite("mad"), {}, given)


def test_an_unknown_suite_is_named():
    with pytest.raises(ValueError, match=r"suite='md': .*Did you mean mad\?"):
        read_suite("md")

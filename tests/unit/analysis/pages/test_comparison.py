"""Runs side by side: what differs, what seeds leave open, the same row for all."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from analysis.pages.comparison import name_apart, open_on_same_rows, write_comparison
from analysis.plain import to_plain
from lab.config import ModelConfig, TrainConfig
from lab.files import RunError
from lab.training.checkpoint import keep_weights, save_checkpoint
from lab.training.loop import start
from lab.training.run import Run
from tasks.mqar import MQAR
from tests.planted_runs import make_result, make_row, write_rows


def trained(path: Path, task: MQAR, seed: int = 0, **model) -> Run:
    """A run folder as training leaves it, without the training."""
    train = TrainConfig(max_steps=4, batch_size=4, test_rows=8, eval_every=2, seed=seed)
    run = Run(path, task, ModelConfig(**{"stack": "AM", "d_model": 16, **model}), train)
    run.claim()
    tested = {
        2: {"test_loss": 2.5, "test_accuracy": 0.25},
        4: {"test_loss": 2.0, "test_accuracy": 0.5},
    }
    rows = [
        make_row(step, loss=5 / step, accuracy=step / 8, **tested.get(step, {}))
        for step in range(1, 5)
    ]
    write_rows(run, rows)
    save_checkpoint(run, start(run.build(), run.train, "fp32"))
    ended = {"accuracy": 0.5, "loss": 1.25, "steps": 4, "seconds": 2.0, "stopped": "budget"}
    run.write_result(make_result(**ended, rows_per_second=8.0))
    return run


def test_names_are_as_long_as_they_must_be():
    assert name_apart([Path("/a/x"), Path("/b/y")]) == ["x", "y"]
    assert name_apart([Path("/a/x/1"), Path("/b/y/1"), Path("/b/x/2")]) == ["x/1", "y/1", "x/2"]
    assert name_apart([Path("/a/x"), Path("/a/x")]) == ["x", "x"]


def test_runs_of_one_task_are_looked_at_on_the_same_rows(tmp_path):
    task = MQAR(seq_len=16, vocab_size=32)
    runs = [trained(tmp_path / name, task, seed) for name, seed in (("a", 0), ("b", 5))]
    first, second = open_on_same_rows(runs, rows=3)
    assert first.batch is second.batch
    assert first.seed == second.seed
    other = trained(tmp_path / "c", replace(task, fillers="zero"))
    first, second = open_on_same_rows([runs[0], other], rows=3)
    assert (first.batch.inputs != second.batch.inputs).any()


def test_the_page_says_what_differs_and_shows_every_layer(tmp_path):
    task = MQAR(seq_len=16, vocab_size=32)
    options = {"S.d_state": 8}
    other = trained(tmp_path / "b", task, stack="SM AM", seed=3, options=options)
    runs = [trained(tmp_path / "<b>a", task), other]
    path = tmp_path / "compare.html"
    found = write_comparison(runs, path, rows=4)
    assert [run.differs for run in found.runs] == [
        {},
        {"stack": "SM AM", "options": options, "seed": 3},
    ]
    assert found.references["oracle"] == 1.0
    assert all(run.interval and run.interval[0] < 0.5 < run.interval[1] for run in found.runs)
    assert to_plain(found)["runs"][1]["parameters"] == runs[1].build().parameter_count()
    attention, state = 16 * 2 * 16 * 4, 8 * 16 * 4
    assert [run.state_size.bytes for run in found.runs] == [attention, state + attention]
    page = path.read_text()
    assert "stack=SM AM, options=S.d_state=8, seed=3" in page
    assert "2,048 bytes at 16 tokens" in page
    assert "&lt;b&gt;a" in page
    assert "<b>a" not in page
    assert found.seeds == ()
    for name in ("layer-0-1", "layer-0-2", "layer-1-1"):
        assert f'id="{name}"' in page
    assert 'id="layer-1-2"' not in page


def planted(path: Path, seed: int, jumps: int, **model) -> Run:
    """A run whose dynamic mask was moved at a step, and nothing else at any."""
    options = {"A.mask": "soft"}
    run = trained(path, MQAR(seq_len=16, vocab_size=32), seed, options=options, **model)
    for step in (1, 2, 4, 8, 16, 32, 64):
        weights = run.load_model(0)
        if step >= jumps:
            with torch.no_grad():
                weights.get_parameter("blocks.0.mixer.mask.l").sub_(3)
        keep_weights(run, step, weights)
    return run


def test_over_seeds_the_page_says_in_which_order_things_change(tmp_path):
    runs = [
        planted(tmp_path / "a0", seed=0, jumps=8),
        planted(tmp_path / "wide", seed=0, jumps=8, d_model=32),
        planted(tmp_path / "a1", seed=1, jumps=16),
    ]
    path = tmp_path / "compare.html"
    [order] = write_comparison(runs, path, rows=4).seeds
    assert order.names == ("a0", "a1")
    assert order.onsets
    assert (order.summary.mean, [run.seed for run in order.summary.runs]) == (0.5, [0, 1])
    assert order.onsets.runs == ("seed 0", "seed 1")
    brackets = []
    for row in order.onsets.onsets:
        [mask] = [onset.change for onset in row if onset.quantity == "mask drift"]
        assert mask
        brackets.append((mask.low, mask.high))
    assert brackets == [(4, 8), (8, 16)]
    page = path.read_text()
    assert "In which order things change, over seeds" in page
    assert "a0, a1 · In which order things change" in page
    assert "Pairs of changes that come in the same order in all 2 runs: 0 of" in page
    assert "95 % over seeds and rows" in page
    assert 'id="order-1"' in page
    assert 'id="order-2"' not in page


@pytest.mark.parametrize(
    ("seeds", "options"),
    [((0, 0), [{}, {}]), ((0, 1), [{}, {"d_model": 32}])],
    ids=["the same seed", "not the seed alone"],
)
def test_without_seeds_to_compare_there_is_no_such_section(seeds, options, tmp_path):
    task = MQAR(seq_len=16, vocab_size=32)
    runs = [
        trained(tmp_path / name, task, seed, **more)
        for name, seed, more in zip("ab", seeds, options, strict=True)
    ]
    path = tmp_path / "compare.html"
    assert write_comparison(runs, path, rows=4).seeds == ()
    assert "over seeds" not in path.read_text()


def test_seeds_without_kept_weights_say_so(tmp_path):
    task = MQAR(seq_len=16, vocab_size=32)
    path = tmp_path / "compare.html"
    runs = [trained(tmp_path / name, task, seed) for seed, name in enumerate("ab")]
    [order] = write_comparison(runs, path, rows=4).seeds
    assert order.onsets is None
    assert "a, b: weights of 1 step are kept, fewer than 4." in path.read_text()


def test_tasks_that_differ_are_compared_each_on_its_own_row(tmp_path):
    runs = [trained(tmp_path / str(n), MQAR(seq_len=n, vocab_size=64)) for n in (16, 32)]
    path = tmp_path / "compare.html"
    found = write_comparison(runs, path, rows=4)
    assert (found.task, found.references) == (None, {})
    assert "Each is on a row of its own task." in path.read_text()


def test_nothing_is_written_where_it_cannot_be(monkeypatch, tmp_path):
    task = MQAR(seq_len=16, vocab_size=32)
    runs = [trained(tmp_path / name, task) for name in "ab"]
    # Refused before the work begins.
    monkeypatch.setattr("analysis.pages.comparison.compare", None)
    with pytest.raises(RunError, match="is a folder, must be a file"):
        write_comparison(runs, tmp_path)
    with pytest.raises(RunError, match="cannot be written"):
        write_comparison(runs, tmp_path / "nowhere" / "page.html")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}

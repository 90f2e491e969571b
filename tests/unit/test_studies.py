"""Studies: cells that resume and fail alone, one tidy table, and verdicts on planted tables."""

import json
import math
import signal
import subprocess
import sys
import time

import numpy as np
import polars as pl
import pytest
import torch
import typer
from typer.testing import CliRunner

from analysis.pages.export import save
from analysis.studies import recall as recalled
from analysis.studies import trainability as trained
from analysis.studies.holm import holm
from lab.cli import app
from lab.cli.cell import train_cell
from lab.cli.training import describe_run
from lab.layers.attention import Attention
from lab.studies import Cell, Study, recall, trainability
from lab.studies.folder import CellFolder
from lab.studies.lengths import evaluate_lengths, find_stage_ends
from lab.studies.published import PUBLISHED
from lab.studies.runner import run_cells
from lab.studies.table import MEASURED, tabulate_cells
from lab.studies.trainability import BASELINE
from lab.studies.variants import (
    ConvolvedAttention,
    NearIdentityAttention,
    NormedAttention,
    PartialRotary,
    ShiftedKeys,
)
from lab.training.runs import Run

TINY = {
    "seq_len": 8,
    "vocab_size": 32,
    "d_model": 8,
    "batch_size": 4,
    "eval_every": 4,
    "test_rows": 8,
    "max_steps": 8,
    "start_len": 8,
    "precision": "fp32",
}
cell_process = typer.Typer()
cell_process.command()(train_cell)
TRAIN = [sys.executable, "-m", "lab.cli.cell"]


def cell(seed: int = 0, lengths: tuple[int, ...] = (8,), **options) -> Cell:
    return Cell(
        {"factor": "tiny", "seed": seed}, "mqar", {**TINY, "seed": seed, **options}, lengths
    )


def study(*cells: Cell) -> Study:
    return Study("tiny", "?", cells)


def test_a_study_has_cells_of_the_same_factors_and_names_none_twice():
    with pytest.raises(ValueError, match="names 2 cells"):
        study(cell(), cell())
    with pytest.raises(ValueError, match="has the factors seed"):
        study(cell(), Cell({"seed": 3}, "mqar", {}, (8,)))
    with pytest.raises(ValueError, match="no cells"):
        study()


def test_only_takes_any_value_of_a_factor_and_all_factors():
    whole = recall.build_study(seeds=2)
    some = whole.select(["mixer=attention", "mixer=soft mask", "d_model=64"])
    assert [(c.factors["mixer"], c.factors["seed"]) for c in some.cells] == [
        *(("attention", 0), ("soft mask", 0), ("attention", 1), ("soft mask", 1))
    ]
    for wrong in ("mixer", "colour=blue", "mixer=blue"):
        with pytest.raises(ValueError, match=f"only={wrong}"):
            whole.select([wrong])


def test_the_first_cells_are_all_mixers_at_64_with_the_first_seed():
    first = recall.build_study().cells[: len(recall.MIXERS)]
    assert {c.factors["mixer"] for c in first} == set(recall.MIXERS)
    assert {(c.factors["d_model"], c.factors["seed"]) for c in first} == {(64, 0)}


@pytest.mark.parametrize(
    "each",
    [
        *trainability.build_study(seeds=1).cells[: len(trainability.CHANGES)],
        *recall.build_study(seeds=1).select(["d_model=32"]).cells,
    ],
    ids=lambda each: each.name,
)
def test_every_cell_makes_a_run(each, tmp_path):
    run, _ = describe_run(each.task, dict(each.options), tmp_path)
    assert run.train.seed == each.factors["seed"]
    assert max(each.lengths) == run.task.seq_len


def test_cells_are_trained_skipped_and_told_apart_from_those_not_run(tmp_path):
    two = study(cell(0), cell(1))
    begun = []
    run_cells(study(cell(0)), tmp_path, TRAIN, on_begin=begun.append)
    found = tabulate_cells(two, tmp_path)
    assert found.columns == ["factor", "seed", *MEASURED]
    assert found["status"].to_list() == ["budget", "not run"]
    run = Run.open(tmp_path / two.cells[0].name / "run")
    result = run.read_result()
    assert result is not None
    row = found.row(0, named=True)
    assert (row["steps"], row["rows"], row["solved"]) == (8, 32, False)
    assert row["accuracy"] == result["accuracy"]
    assert row["parameters"] == run.build().parameter_count()
    assert found.row(1, named=True)["accuracy"] is None
    run_cells(study(cell(0)), tmp_path, TRAIN, on_begin=begun.append)
    assert len(begun) == 1


def test_a_failing_cell_is_recorded_and_stops_no_other(tmp_path):
    fails = 'case "$0" in *seed=0) echo "Error: planted"; exit 3;; esac'
    ended = []
    both = study(cell(0), cell(1))
    run_cells(
        both,
        tmp_path,
        ["sh", "-c", fails],
        workers=2,
        on_end=lambda cell, folder: ended.append(folder.read_error()),
    )
    assert set(ended) == {"exit code 3: planted", None}
    found = tabulate_cells(both, tmp_path)
    assert found["status"].to_list() == ["failed", "unfinished"]
    assert found["error"].to_list() == ["exit code 3: planted", None]


def test_the_error_of_a_real_cell_is_one_line(tmp_path):
    bad = cell(options=["A.no_such=1"])
    folder = CellFolder(tmp_path / bad.name)
    folder.claim(bad)
    answer = CliRunner().invoke(cell_process, [str(folder.path)])
    assert answer.exit_code == 2
    assert answer.stderr.startswith("Error: unknown option A.no_such")


def test_a_folder_of_another_cell_is_an_error_of_that_cell(tmp_path):
    CellFolder(tmp_path / cell().name).claim(cell())
    other = cell(d_model=16)
    run_cells(study(other), tmp_path, ["false"])
    error = CellFolder(tmp_path / other.name).read_error()
    assert error is not None
    assert "holds a cell with options=" in error


def test_minutes_that_are_up_end_a_cell_and_more_of_them_resume_it(tmp_path):
    long = study(cell(max_steps=60))
    folder = CellFolder(tmp_path / long.cells[0].name)
    run_cells(long, tmp_path, TRAIN, max_minutes=1e-3)
    row = tabulate_cells(long, tmp_path).row(0, named=True)
    assert row["status"] == "out of time"
    assert row["solved"] is False
    assert 1 <= row["steps"] < 60
    assert row["accuracy"] is not None
    run_cells(long, tmp_path, ["false"], max_minutes=1e-3)
    assert folder.find_status() == "out of time", "its minutes are up: nothing is tried"
    run_cells(long, tmp_path, TRAIN)
    assert tabulate_cells(long, tmp_path).row(0, named=True)["steps"] == 60


def test_a_signal_leaves_a_cell_that_goes_on(tmp_path):
    steps = 4000
    options = {**TINY, "max_steps": steps, "eval_every": 1000, "early_stop": False}
    program = (
        "import sys; from lab.studies import Cell, Study; from lab.studies.runner import run_cells;"
        "from pathlib import Path;"
        f"c = Cell({{'seed': 0}}, 'mqar', {options!r}, (8,));"
        f"sys.exit(run_cells(Study('s', '?', (c,)), Path({str(tmp_path)!r}), {TRAIN!r}) or 0)"
    )
    path = tmp_path / "seed=0"
    process = subprocess.Popen([sys.executable, "-c", program])
    metrics = path / "run" / "metrics.jsonl"
    while not metrics.exists() or not metrics.read_text().count("\n") > 3:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == signal.SIGINT
    folder = CellFolder(path)
    assert (folder.find_status(), folder.read_error()) == ("unfinished", None)
    (step,) = Run.open(path / "run").list_checkpoints()
    assert 0 < step < steps


def test_lengths_are_evaluated_with_the_weights_at_the_end_of_their_stage(tmp_path):
    given = {**TINY, "seq_len": 32, "vocab_size": 64, "lengthen_at": 0.09, "max_steps": 12}
    run, runtime = describe_run("mqar", {**given, "stage_steps": 8}, tmp_path / "run")
    from lab.training.experiment import carry_out as train

    result = train(run, runtime)
    ends = find_stage_ends(run)
    steps = list(np.cumsum([stage.steps for stage in run.read_metrics().stages]))
    assert list(ends.values()) == steps[:-1]
    found = evaluate_lengths(run, [8, 16, 32])
    assert [entry["seq_len"] for entry in found] == [8, 16, 32]
    for entry in found:
        assert entry["step"] == ends.get(entry["seq_len"], result["steps"])
    assert found[-1]["test"] == result["accuracy"]


def planted(factor: str, steps: list[int], solved: list[bool] | None = None) -> pl.DataFrame:
    solved = solved or [True] * len(steps)
    return pl.DataFrame(
        [
            {
                "factor": factor,
                "seed": seed,
                **dict.fromkeys(MEASURED),
                "status": "solved" if ended else "budget",
                "solved": ended,
                "steps": count,
                "rows": 64 * count,
            }
            for seed, (count, ended) in enumerate(zip(steps, solved, strict=True))
        ],
        schema={"factor": pl.String, "seed": pl.Int64, **MEASURED},
    )


BEFORE = planted(BASELINE, [300 + 10 * i for i in range(18)])


def test_medians_know_that_censored_runs_take_longer():
    found = trained.measure(
        pl.concat(
            [
                BEFORE,
                planted("half", [100, 200, 700, 700], [True, True, False, False]),
                planted("most", [100, 200, 300, 700], [True, True, True, False]),
                planted("never", [700, 700, 700], [False] * 3),
            ]
        )
    )
    medians = {effect.factor: effect.median for effect in found}
    assert medians == {"half": 200, "most": 200, BASELINE: 380, "never": math.inf}
    assert [effect.factor for effect in found][-1] == "never"
    assert next(e for e in found if e.factor == "most").rows == 64 * 200


def test_a_planted_effect_is_found_and_a_null_is_not():
    rng = np.random.default_rng(0)
    nulls = [planted(f"null {i}", [int(s) for s in rng.integers(300, 480, 3)]) for i in range(20)]
    found = trained.measure(
        pl.concat(
            [BEFORE, planted("fast", [100, 110, 120]), planted("slow", [600, 610, 620]), *nulls]
        )
    )
    assert {effect.factor for effect in found if effect.counts} == {"fast", "slow"}
    faster, slower, same = trained.verdict(found, 0)
    assert faster.startswith("Shorter than the baseline's: fast (110 steps)")
    assert slower.startswith("Longer: slow (610 steps)")
    assert all(f"null {i}" in same for i in range(20))


def test_the_verdict_is_silent_on_a_null_and_says_when_runs_are_too_few():
    three = planted(BASELINE, [300, 310, 320])
    found = trained.measure(pl.concat([three, planted("fast", [100, 110, 120])]))
    assert not any(effect.counts for effect in found)
    said = trained.verdict(found, 5)
    assert not any(text.startswith(("Shorter", "Longer")) for text in said)
    assert "1 of 1 factors have too few runs" in said[1]
    assert said[-1].startswith("5 cells have not ended")
    assert trained.verdict(trained.measure(three), 0) == [
        "The baseline and a factor must be run first: no verdict."
    ]


def test_the_log_rank_test_is_exact_and_near_the_usual_one_for_many_runs():
    few = [300, 310, 320], [True] * 3
    assert trained.log_rank_p([100, 110, 120], [True] * 3, *few) == pytest.approx(0.1)
    assert trained.log_rank_p(*few, *few) == 1
    from lifelines.statistics import logrank_test

    rng = np.random.default_rng(1)
    drawn = [rng.exponential(90, 50).round(), rng.exponential(160, 60).round()]
    seen = [(np.minimum(t, 250).astype(int).tolist(), (t < 250).tolist()) for t in drawn]
    usual = logrank_test(seen[0][0], seen[1][0], seen[0][1], seen[1][1]).p_value
    assert 0.001 < usual < 0.2
    assert trained.log_rank_p(*seen[0], *seen[1]) == pytest.approx(usual, rel=0.3)


def test_holm_is_as_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
    assert trained.least_p(3, 3) == pytest.approx(0.1)


def test_a_missing_library_is_one_line_before_anything_is_run(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    answer = CliRunner().invoke(app, ["study", "trainability", "--out", str(tmp_path / "s")])
    assert answer.exit_code == 2
    assert "lifelines" in answer.stderr
    assert "pip install" in answer.stderr
    assert not (tmp_path / "s").exists()


def recall_rows(mixer: str, accuracy: float | None, rate: str = "lab", validation: float = 0.0):
    return [
        {
            "mixer": mixer,
            "d_model": width,
            "learning_rate": rate,
            "seed": seed,
            **dict.fromkeys(MEASURED),
            "seq_len": length,
            "status": "not run" if accuracy is None else "budget",
            "solved": None if accuracy is None else False,
            "accuracy": None if accuracy is None else accuracy + seed / 1000,
            "validation": validation,
        }
        for width in (64, 128)
        for length in recall.LENGTHS
        for seed in range(2)
    ]


def recall_frame(*rows) -> pl.DataFrame:
    head = {"mixer": pl.String, "d_model": pl.Int64, "learning_rate": pl.String, "seed": pl.Int64}
    return pl.DataFrame([row for part in rows for row in part], schema={**head, **MEASURED})


def test_the_verdict_speaks_of_what_was_run_alone():
    nothing = recall_frame(recall_rows("attention", None), recall_rows("soft mask", None))
    assert recalled.measure(nothing) == []
    assert recalled.verdict([], 16) == ["No setting was run, 16 are left: no verdict."]
    half = recall_frame(recall_rows("attention", 0.99), recall_rows("soft mask", None))
    settings = recalled.measure(half)
    said = recalled.verdict(settings, recalled.missing(half))
    assert len(said) == 2
    assert said[0].startswith("attention is more accurate here than in the paper in 8 of 8")
    assert "most at T 2,048, d_model 64, 0.99 against 0.09" in said[0]
    assert said[1].startswith("8 settings of the study were not run")


def recall_runs(mixer: str, gain: float, spread: float, seed: int):
    """Return eight runs of a mixer at one width, each about `gain` better than a half."""
    noise = np.random.default_rng(seed).normal(0, spread, 8)
    rows = recall_rows(mixer, 0.5)[: 2 * len(recall.LENGTHS)]
    return [
        {**row, "seed": run, "accuracy": 0.5 + gain + float(noise[run])}
        for run in range(8)
        for row in rows
        if row["seed"] == 0
    ]


def test_a_mask_that_is_level_with_attention_is_not_ahead_and_a_better_one_is():
    found = recalled.measure(
        recall_frame(
            recall_runs("attention", 0, 0.02, 0),
            recall_runs("soft mask", 0, 0.02, 1),
            recall_runs("value mask", 0.3, 0.02, 2),
            recall_runs("literal mask", -0.3, 0.02, 3),
        )
    )
    paper, *said = recalled.verdict(found, 0)[1:]
    assert paper.startswith("The paper has the dynamic mask ahead of attention without one in 4 of")
    assert [text.split(" attention without one: ")[0] for text in said] == [
        "Here the value mask is ahead of",
        "Here the soft mask cannot be told from",
        "Here the literal mask is behind",
    ]


def test_flips_of_signs_give_the_p_they_give_by_hand():
    assert recalled.sign_flip_p(np.array([1.0, 2.0, 3.0])) == 2 / 8
    assert recalled.sign_flip_p(np.array([1.0, -1.0])) == 1
    assert recalled.sign_flip_p(np.full(20, 0.1)) < 1e-3


def test_the_learning_rate_is_chosen_on_validation_rows():
    frame = recall_frame(
        recall_rows("attention", 0.9, "lab", validation=0.1),
        recall_rows("attention", 0.2, "0.001", validation=0.3),
    )
    assert {s.learning_rate for s in recalled.measure(frame)} == {"0.001"}


def test_the_papers_numbers_are_all_there():
    assert len(PUBLISHED) == 4 * 4 * 4
    assert PUBLISHED["attention", 2048, 256] == 0.36
    assert PUBLISHED["dynamic mask attention", 512, 64] == 0.79


def test_figures_are_drawn(tmp_path):
    settings = recalled.measure(
        recall_frame(recall_rows("attention", 0.9), recall_rows("SSD, RoPE", 0.4))
    )
    drawn = recalled.draw(settings)
    traces = drawn.to_dict()["data"]
    names = [trace["name"] for trace in traces if trace["showlegend"]]
    assert names[:2] == ["attention", "SSD, RoPE"]
    assert "paper: Based" in names
    save(drawn, tmp_path / "recall.html")
    effects = trained.measure(pl.concat([BEFORE, planted("never <b>", [700] * 3, [False] * 3)]))
    save(trained.draw(effects), tmp_path / "map.html")
    assert "never &lt;b&gt;" in str(trained.draw(effects))


def test_a_study_through_the_command_line(tmp_path, monkeypatch):
    from lab.studies import trainability as module

    tiny = {**TINY, "stack": "AM*1"}
    monkeypatch.setattr(module, "SETTING", tiny)
    monkeypatch.setattr(module, "SEQ_LEN", 8)
    changes = {BASELINE: {}, "2 heads": {"n_heads": 2}}
    monkeypatch.setattr(module, "CHANGES", changes)
    monkeypatch.setattr(module, "BASELINE_SEEDS", 1)
    out, file, picture = tmp_path / "out", tmp_path / "t.csv", tmp_path / "f.html"
    words = ["study", "trainability", "--seeds", "2", "--out", out, "--table", file]
    answer = CliRunner().invoke(app, [*map(str, words), "--workers", "2"])
    assert answer.exit_code == 0, answer.output
    assert "2 heads" in answer.stdout
    assert "too few runs" in answer.stdout
    found = pl.read_csv(file)
    assert found["status"].to_list() == ["budget"] * 4
    file.unlink()
    words = [*words, "--show", "--figure", picture]
    again = CliRunner().invoke(app, [str(word) for word in words])
    assert again.exit_code == 0, again.output
    assert pl.read_csv(file).equals(found)
    assert picture.exists()
    assert json.loads(next(out.glob("*/cell.json")).read_text())["task"] == "mqar"


def test_wrong_options_are_one_line(tmp_path):
    for words in (
        ["--only", "colour=blue"],
        ["--workers", "0"],
        ["--seeds", "0"],
        ["--precision", "fp8"],
        ["--max-minutes", "0"],
        ["--table", "t.xls"],
        ["--figure", "f.gif"],
    ):
        answer = CliRunner().invoke(app, ["reproduce", "recall", "--out", str(tmp_path), *words])
        assert answer.exit_code == 2, words
        assert len(answer.stderr.strip().splitlines()) == 1


def test_rotating_all_channels_is_attention():
    torch.manual_seed(0)
    plain, partial = Attention(16, 2), PartialRotary(16, 2, share=1.0)
    partial.load_state_dict(plain.state_dict())
    x = torch.randn(2, 9, 16)
    torch.testing.assert_close(partial(x), plain(x))


def test_rotating_part_leaves_the_other_channels():
    torch.manual_seed(0)
    layer, x = PartialRotary(16, 2, share=0.5), torch.randn(1, 5, 16)
    with torch.no_grad():
        q, _ = layer._project_and_rotate(x, torch.arange(5))
        bare = layer.q(x).unflatten(-1, (2, 8)).transpose(1, 2)
    torch.testing.assert_close(q[..., 4:], bare[..., 4:])
    assert not torch.isclose(q[:, :, 1:, :4], bare[:, :, 1:, :4]).all()
    with pytest.raises(ValueError, match=r"share=0\.3"):
        PartialRotary(16, 2, share=0.3)


def test_variants_are_attention_but_for_one_thing():
    torch.manual_seed(0)
    plain, x = Attention(16, 2), torch.randn(2, 9, 16)
    convolved = ConvolvedAttention(16, 2)
    convolved.attention.load_state_dict(plain.state_dict())
    with torch.no_grad():
        convolved.convolution.weight.zero_()[:, -1] = 1
        convolved.convolution.bias.zero_()
    torch.testing.assert_close(convolved(x), plain(x))
    # Where every token is the same, the keys before are those here, but for the first token.
    shifted, same = ShiftedKeys(16, 2), x[:, :1].expand(-1, 9, -1)
    shifted.attention.load_state_dict(plain.state_dict())
    torch.testing.assert_close(shifted(same), plain(same))
    assert not torch.isclose(shifted(x), plain(x)).all()


def test_normed_queries_do_not_know_their_scale():
    torch.manual_seed(0)
    layer, x = NormedAttention(16, 2), torch.randn(2, 9, 16)
    before = layer(x)
    with torch.no_grad():
        layer.q.weight.mul_(7)
    torch.testing.assert_close(layer(x), before)


def test_values_near_identity_come_out_as_they_went_in():
    layer, x = NearIdentityAttention(64, noise=0.0), torch.randn(1, 1, 64)
    torch.testing.assert_close(layer(x), x)

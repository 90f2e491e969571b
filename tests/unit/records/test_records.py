"""Records: judged at their rate, recomputed from their files, refused where rules are broken."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from analysis.records import judgement, track
from analysis.records.candidate import FREE, Candidate
from analysis.records.entry import HOME, Entry, RecordTrial, read_history
from analysis.records.history import (
    BEGIN,
    END,
    PAGE,
    build_table,
    draw,
    format_median,
    read_histories,
)
from analysis.records.judgement import judge, verify_history
from analysis.records.track import TRACKS, Track
from lab import certification
from lab.cli import app, record_certificate
from lab.cli import record as command
from lab.cli.run_settings import read_settings
from lab.files import RunError
from lab.models import build

pytestmark = pytest.mark.usefixtures("forked_workers")

LAWFUL = [{"law": law, "verdict": "holds", "evidence": ""} for law in record_certificate.MUST_HOLD]
COUNT = 6
"""Runs of an entry here: p is exact, and ten against ten can be split in 184,756 ways."""
TINY = """
says = "A tiny attention."
[options]
stack = "AN"
d_model = 8
batch_size = 4
max_steps = 2
eval_every = 1
start_len = 8
"""


def run_trials(means: float, rng, count: int = 5, unsolved: int = 0, limit: int = 0):
    """Runs whose rows and CPU seconds are normal about a mean; the last ones are not solved."""
    found = []
    for seed in range(count):
        solved, rows = seed < count - unsolved, int(rng.normal(means, 20))
        rows = rows if solved else limit
        found.append(RecordTrial(seed, solved, rows, float(rows), rows, 0.99 if solved else 0.5))
    return tuple(found)


def make_entry(number: int, trials, before: str | None, p: float | None, **changes) -> Entry:
    return Entry(
        track="rows-256",
        number=number,
        candidate=Candidate(f"entry-{number}", "A test.", {"d_model": 64 + number}),
        trials=trials,
        before=before,
        rerun=None,
        p=p,
        certificate="3 hold",
        source=None,
        code="0",
        machine="here",
        versions={"torch": "2"},
        date="2026-11-23T00:00:00+00:00",
        **changes,
    )


@pytest.fixture
def history(monkeypatch):
    monkeypatch.setattr(judgement, "RECORD_SEEDS", COUNT)
    rng = np.random.default_rng(0)
    first, second = run_trials(1000, rng, COUNT), run_trials(800, rng, COUNT)
    p = judge(second, first, "rows").p
    return [make_entry(1, first, None, None), make_entry(2, second, "entry-1", p)]


def test_records_are_judged_at_their_rate():
    rng = np.random.default_rng(1)
    null = [judge(run_trials(1000, rng), run_trials(1000, rng), "rows") for _ in range(40)]
    assert sum(found.is_record for found in null) <= 3  # 0.3 are expected
    better = [judge(run_trials(900, rng), run_trials(1000, rng), "cpu") for _ in range(10)]
    assert all(found.is_record for found in better)
    assert all(found.p == pytest.approx(1 / 252) for found in better)
    worse = judge(run_trials(1000, rng), run_trials(900, rng), "rows")
    assert (worse.is_record, worse.p) == (False, 1.0)


def test_a_run_that_is_not_solved_counts_as_longer_than_all():
    rng = np.random.default_rng(2)
    holder = run_trials(1000, rng, COUNT)
    early = run_trials(900, rng, COUNT, unsolved=2, limit=10)
    late = run_trials(900, rng, COUNT, unsolved=2, limit=90_000)
    assert judge(run_trials(900, rng, COUNT), holder, "rows").is_record
    assert not judge(early, holder, "rows").is_record
    assert judge(early, holder, "rows").p == pytest.approx(judge(late, holder, "rows").p, abs=0.05)
    half = run_trials(900, rng, COUNT, unsolved=4, limit=10)
    assert "more than half" in judge(half, None, "rows").because
    assert judge(run_trials(900, rng, COUNT), None, "rows").is_record


def test_an_entry_is_read_as_it_was_written_and_its_p_computed_again(history, tmp_path):
    files = [entry.write(tmp_path) for entry in history]
    assert read_history(tmp_path, TRACKS["rows-256"]) == history
    verify_history(history, "rows")
    with pytest.raises(RunError, match="is not a record by its own numbers"):
        verify_history([history[0], replace(history[1], p=1e-5)], "rows")
    slower = tuple(replace(trial, rows=2 * trial.rows) for trial in history[1].trials)
    with pytest.raises(RunError, match="is not a record by its own numbers"):
        verify_history([history[0], replace(history[1], trials=slower)], "rows")
    held = json.loads(files[1].read_text())
    for change, said in (
        ({"p": "small"}, "p="),
        ({"trials": [{"seed": 1}]}, "trials.0.solved is missing"),
        ({"trials": [held["trials"][0] | {"rows": "8"}]}, "trials.0.rows='8': must be a valid int"),
        ({"trials": [held["trials"][0] | {"colour": 1}]}, "trials.0.colour=1"),
        ({"colour": 1}, "colour"),
        ({"before": "someone"}, "must be entry 2 and follow entry-1"),
    ):
        files[1].write_text(json.dumps({**held, **change}))
        with pytest.raises(RunError, match=said):
            read_history(tmp_path, TRACKS["rows-256"])


def test_the_figure_has_every_run_and_the_rerun_beside_it(history):
    entries = [history[0], replace(history[1], rerun=history[0].trials)]
    lines = draw(entries, Track("cpu", 256, 64)).to_dict()["data"]
    assert sum(len(line["x"]) for line in lines if "a run" in line["name"]) == 2 * COUNT
    assert sum(len(line["x"]) for line in lines if "rerun" in line["name"]) == COUNT
    assert lines[-1]["y"][1] < lines[-1]["y"][0]


def test_the_records_of_the_project_stand_and_are_in_its_documents():
    histories = read_histories(HOME)
    for name, entries in histories.items():
        verify_history(entries, TRACKS[name].measure)
    page = (HOME.parents[1] / PAGE).read_text(encoding="utf-8")
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == build_table(histories)


def test_the_table_names_the_holder_first(history):
    lines = build_table({"rows-256": history, "cpu-256": []}).splitlines()
    assert [line.split(" | ")[1] for line in lines[2:5]] == ["2. entry-2", "1. entry-1", "none yet"]
    assert TRACKS["rows-256-ssd"].says == f"{TRACKS['rows-256'].says}, SSD alone"


def test_an_end_that_too_few_solved_runs_leave_open_is_unknown():
    half = run_trials(1000, np.random.default_rng(0), COUNT, unsolved=2)
    assert format_median(half, "rows").endswith(" … unknown)")


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Tracks of rows of 8 tokens that chance solves, two seeds, and laws that hold."""
    courses = [Track(measure, 8, 2, vocab_size=16) for measure in ("rows", "cpu")]
    courses.append(Track("rows", 8, 2, only_ssd=True, vocab_size=16))
    for each in courses:
        monkeypatch.setitem(TRACKS, each.name, each)
    monkeypatch.setattr(track, "SOLVED_AT", 1e-6)
    monkeypatch.setattr(track, "TEST_ROWS", 64)
    monkeypatch.setattr(command, "RECORD_SEEDS", 2)
    monkeypatch.setattr(judgement, "RECORD_SEEDS", 2)
    answer = {"laws": LAWFUL}
    monkeypatch.setattr(certification, "certify_in_child", lambda *args: answer)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "records").mkdir()
    (tmp_path / "tiny.toml").write_text(TINY)
    return answer


def invoke(words: str):
    return CliRunner().invoke(app, ["record", *words.split(), "--records", "records"])


def test_a_candidate_takes_a_free_track_and_the_next_is_judged_against_its_rerun(
    tiny, tmp_path, monkeypatch
):
    first = invoke("rows-8 tiny.toml --seeds 2 --workers 1")
    assert first.exit_code == 0, first.output
    assert "a record: nobody held the track; 2 of 2 runs were solved" in first.stdout
    (entry,) = read_history(Path("records"), TRACKS["rows-8"])
    assert [trial.seed for trial in entry.trials] == [1000, 1001]
    assert {trial.rows for trial in entry.trials} <= {4, 8}
    assert all(trial.cpu_seconds > 0 and trial.solved for trial in entry.trials)
    assert invoke("rows-8 tiny.toml").stdout == "tiny is entry 1 of rows-8.\n"
    # The same runs serve the other measure.
    timed = invoke("cpu-8 tiny.toml --seeds 2 --figure history.html")
    assert timed.exit_code == 0, timed.output
    assert "all 2 runs have ended" in timed.stderr
    assert "rows of 8 tokens" in Path("history.html").read_text()
    (tmp_path / "clipped.toml").write_text(TINY + "clip_norm = 0.5")
    again = invoke("cpu-8 clipped.toml --seeds 2")
    assert again.exit_code == 0, again.output
    assert "4 of 4 runs to do, 1 process at a time, in runs/records/8-clipped-against-tiny" in (
        " ".join(again.stderr.split())
    )
    assert again.stdout.startswith("no record: median ")
    assert len(read_history(Path("records"), TRACKS["cpu-8"])) == 1
    (tmp_path / "same.toml").write_text(TINY)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tiny.toml").write_text(TINY.replace("d_model = 8", "d_model = 16"))
    assert "has the options of tiny" in invoke("cpu-8 same.toml --seeds 2").stderr
    assert "entry 1 has this name" in invoke("cpu-8 other/tiny.toml --seeds 2").stderr
    assert invoke("cpu-8").stdout.count("tiny") == 1
    monkeypatch.setattr("lab.machine.describe_machine", lambda: "another")
    moved = invoke("cpu-8 clipped.toml --seeds 2")
    assert moved.exit_code == 1
    assert "its runs were measured on another machine" in " ".join(moved.stderr.split())


def test_an_unlawful_or_undecided_model_is_refused_before_it_trains(tiny):
    broken = {"law": "padding", "verdict": "fails", "counterexample": "row 3", "evidence": ""}
    tiny["laws"] = [*LAWFUL, broken]
    answer = invoke("rows-8 tiny.toml --seeds 2")
    assert answer.exit_code == 2
    assert "the model breaks the law “padding”: row 3" in answer.stderr
    tiny["laws"] = [{**LAWFUL[0], "verdict": "not decided", "evidence": "no time"}, *LAWFUL[1:]]
    assert "must hold, is not decided: no time" in invoke("rows-8 tiny.toml --seeds 2").stderr
    assert not Path("runs").exists()


def test_what_is_certified_is_the_model_that_trains():
    given = {"stack": "SM", "d_model": 16, "options": ["S.d_state=4"], "seq_len": 16}
    run, _ = read_settings("mqar", {**given, "vocab_size": 32})
    request = record_certificate.describe_certification(run)
    options = dict(request.settings.options or {})
    assert options.pop("vocab_size") == record_certificate.CERTIFIED_VOCABULARY
    assert options == run.model.to_dict()
    assert build(**options, vocab_size=32).parameter_count() == run.build().parameter_count()


FOREIGN = TINY.replace('stack = "AN"', 'stack = "UN"\nmodel = "no_such_module:Mixer"')


@pytest.mark.parametrize(
    ("words", "content", "said"),
    [
        ("rows-265 tiny.toml", TINY, "is not a track. Did you mean rows-256"),
        ("rows-8 tiny.toml --seeds 1", TINY, "seeds=1: must be in 2 … 1,000"),
        ("rows-8 tiny.toml --records nowhere", TINY, "records=nowhere: does not exist"),
        ("rows-8 none.toml", TINY, "none.toml: cannot be read"),
        ("rows-8 tiny.json", TINY, "must be a .toml file"),
        ("rows-8 tiny.toml", TINY.replace("says", "said"), "unknown part 'said'"),
        ("rows-8 tiny.toml", TINY.replace("A tiny attention.", ""), "says must be a sentence"),
        ("rows-8 tiny.toml", TINY + "seq_len = 16", "seq_len: is set by the track"),
        ("rows-8 tiny.toml", TINY + 'init = "oracle"', "init: is set by the track"),
        ("rows-8 tiny.toml", TINY + "learning_rat = 1", "Did you mean learning_rate"),
        ("rows-8 tiny.toml", TINY + "weight_decay = [1]", "must be a number, text or truth"),
        ("rows-8 tiny.toml", TINY + "clip_norm = -1", "clip_norm=-1: must be > 0"),
        ("rows-8-ssd tiny.toml", TINY, "tiny: stack=AN: has Attention"),
        (
            "rows-8 tiny.toml",
            FOREIGN,
            "would import and run no_such_module:Mixer, which you have not named; --trust",
        ),
        ("rows-8 tiny.toml --trust", FOREIGN, "no_such_module:Mixer: cannot be imported"),
        ("rows-8 tiny.toml --workers 0", TINY, "workers=0: must be ≥ 1"),
        ("rows-8 --figure f.html", TINY, "has no entry yet"),
        ("--figure f.html", TINY, "shows one track; name it"),
    ],
)
def test_what_breaks_a_rule_is_refused_in_one_line(tiny, words, content, said):
    Path("tiny.toml").write_text(content)
    found = CliRunner().invoke(app, ["record", "--records", "records", *words.split()])
    assert found.exit_code == 2, found.output
    assert said in " ".join(found.stderr.split())
    assert not Path("runs").exists()


def test_a_candidate_chooses_no_option_that_the_track_sets():
    assert {"stack", "model", "learning_rate", "batch_size", "max_steps", "lengthen"} <= set(FREE)
    assert not set(FREE) & {"seed", "seq_len", "test_rows", "solved_at", "early_stop", "device"}

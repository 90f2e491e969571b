"""Reports in a run folder: equal ones merge, others get files of their own, none is lost."""

import json
import re

import pytest

from analysis import ANALYSES
from analysis.base import Subject
from analysis.examination import DATA, examine
from analysis.pages.report import render, write_both, write_quick
from analysis.pages.report_files import Report, choose_work, find_page, is_complete
from lab.config import ModelConfig, TrainConfig
from lab.files import RunError
from lab.training.checkpoint import save_checkpoint
from lab.training.loop import start
from lab.training.run import Run
from tasks.mqar import MQAR


@pytest.fixture
def run(tmp_path) -> Run:
    """A run folder with a checkpoint of step 4, without the training."""
    train = TrainConfig(max_steps=4, batch_size=4, test_rows=4, eval_every=2)
    model = ModelConfig(stack="AN", d_model=8)
    run = Run(tmp_path / "run", MQAR(seq_len=16, vocab_size=32), model, train)
    run.claim()
    reach(run, 4)
    return run


def reach(run: Run, step: int) -> None:
    state = start(run.build(), run.train, "fp32")
    state.step = step
    save_checkpoint(run, state)


def analyze(run: Run, *only: str, rows: int = 4, step: int | None = None) -> list[str]:
    """Analyse, and return the notes."""
    notes: list[str] = []
    write_both(run, examine(Subject.of(run, rows=rows, step=step), only), notes.append)
    return notes


def names(run: Run) -> dict[str, list[str]]:
    """Return the analyses of every report, by the name of its numbers; the page has the same."""
    found = {}
    for file in run.path.glob("analysis*.json"):
        found[file.stem] = list(json.loads(file.read_text())["analyses"])
        page = file.with_name(file.name.replace("analysis", "report")).with_suffix(".html")
        sections = re.findall(r'<section class="analysis" id="(\w+)">', page.read_text())
        assert sections == found[file.stem]
    return found


def test_analyses_of_the_same_rows_merge_in_the_order_of_the_report(run):
    assert analyze(run, "heads", "matrices") == []
    whole = examine(Subject.of(run, rows=4), ["rows", "matrices", "heads"])
    assert analyze(run, "rows") == []
    assert names(run) == {"analysis": ["rows", "matrices", "heads"]}
    numbers = json.loads((run.path / "analysis.json").read_text())
    at_once = json.loads(json.dumps(Report.of(whole).numbers))
    assert numbers["analyses"] == at_once["analyses"]
    assert numbers["provenance"] == at_once["provenance"]
    assert numbers["earlier"] == {}
    # The merged page is that of an examination that did all of it at once.
    assert (run.path / "report.html").read_text() == render(run, whole)


def test_a_report_is_complete_when_each_analysis_is_kept_or_does_not_apply(run, monkeypatch):
    few = {name: ANALYSES[name] for name in ("rows", "heads")}
    monkeypatch.setattr("analysis.pages.report_files.ANALYSES", few)
    assert not is_complete(run)
    analyze(run, "rows")
    assert not is_complete(run)
    analyze(run, "heads")
    assert is_complete(run)
    reach(run, 8)
    assert not is_complete(run)


def test_another_step_has_files_of_its_own_and_old_reports_keep_theirs(run):
    analyze(run, "matrices", "heads")
    before = (run.path / "report.html").read_text()
    assert analyze(run, "rows", step=0) == []
    assert names(run) == {"analysis": ["matrices", "heads"], "analysis-step0": ["rows"]}
    analyze(run, "heads", step=0)
    assert find_page(run) == run.path / "report.html"
    reach(run, 8)
    assert find_page(run) is None
    [note] = analyze(run, "rows")
    assert note == f"the report of step 4 is now {run.path}/report-step4.html"
    assert names(run) == {
        "analysis": ["rows"],
        "analysis-step0": ["rows", "heads"],
        "analysis-step4": ["matrices", "heads"],
    }
    assert (run.path / "report-step4.html").read_text() == before


def test_other_rows_neither_mix_with_a_report_nor_replace_it(run):
    analyze(run, "matrices", "heads", rows=4)
    [note] = analyze(run, "heads", rows=2)
    assert "report.html has other analyses, on 4 rows; those on 2 rows get files" in note
    assert names(run) == {"analysis": ["matrices", "heads"], "analysis-rows2": ["heads"]}
    # More analyses on fewer rows: each has what the other lacks.
    [note] = analyze(run, "rows", "matrices", "heads", rows=2)
    assert note == f"the report on 4 rows is now {run.path}/report-rows4.html"
    [note] = analyze(run, "rows", "matrices", "heads", rows=3)
    assert note == f"the report on 2 rows is now {run.path}/report-rows2-2.html"
    assert names(run) == {
        "analysis": ["rows", "matrices", "heads"],
        "analysis-rows2": ["heads"],
        "analysis-rows2-2": ["rows", "matrices", "heads"],
        "analysis-rows4": ["matrices", "heads"],
    }
    assert json.loads((run.path / "analysis.json").read_text())["rows"] == 3


def test_without_a_number_of_rows_analyses_take_those_of_the_report(run):
    assert choose_work(run, ["heads"], None, None) == (["heads"], None)
    analyze(run, "matrices", rows=3)
    assert choose_work(run, ["heads"], None, None) == (["heads"], 3)
    assert choose_work(run, ["heads"], 5, None) == (["heads"], 5)
    assert choose_work(run, ["heads"], None, 0) == (["heads"], None)
    # The default is larger, and a report of all analyses may replace this one.
    assert choose_work(run, None, None, None) == (None, 256)
    files = write_quick(run)
    assert json.loads(files.numbers.read_text())["rows"] == 3


def test_a_report_of_an_older_version_is_measured_again_where_its_figures_are_gone(run):
    analyze(run, "matrices", "rows")
    (run.path / "report.json").unlink()
    only, rows = choose_work(run, ["heads"], None, None)
    assert only is not None
    assert only == ["heads", "rows", "matrices"]
    analyze(run, *only, rows=rows or 0)
    assert names(run) == {"analysis": ["rows", "matrices", "heads"]}


def test_what_another_version_measured_is_named(run):
    analyze(run, "matrices")
    numbers = json.loads((run.path / "analysis.json").read_text())
    numbers["provenance"]["torch"] = "1.0"
    (run.path / "analysis.json").write_text(json.dumps(numbers))
    analyze(run, "heads")
    merged = json.loads((run.path / "analysis.json").read_text())
    assert merged["earlier"]["matrices"]["torch"] == "1.0"
    page = (run.path / "report.html").read_text()
    assert "<dt>torch, of matrices</dt><dd>1.0</dd>" in page
    analyze(run, "matrices")
    merged = json.loads((run.path / "analysis.json").read_text())
    assert merged["earlier"] == {}


def test_other_data_do_not_merge(run):
    analyze(run, "matrices", "heads")
    numbers = json.loads((run.path / "analysis.json").read_text())
    numbers["provenance"][DATA] = "0"
    (run.path / "analysis.json").write_text(json.dumps(numbers))
    analyze(run, "heads")
    assert set(names(run)) == {"analysis", "analysis-rows4"}


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 2}', '{"format": 1}'])
def test_a_report_that_cannot_be_read_is_not_replaced(run, content):
    file = run.path / "analysis.json"
    file.write_text(content)
    with pytest.raises(RunError, match=r"analysis\.json.*move it away to begin a new one"):
        analyze(run, "rows")
    assert file.read_text() == content
    assert not (run.path / "report.html").exists()


def test_an_analysis_that_this_version_lacks_keeps_its_numbers(run, monkeypatch):
    monkeypatch.setitem(ANALYSES, "older", ANALYSES["rows"])
    analyze(run, "older", "heads")
    monkeypatch.delitem(ANALYSES, "older")
    analyze(run, "rows")
    numbers = json.loads((run.path / "analysis.json").read_text())
    assert list(numbers["analyses"]) == ["rows", "heads", "older"]


def test_no_file_that_the_lab_did_not_make_is_lost(run):
    mine = {name: run.path / name for name in ("report.html", "report.json", "report-step4.html")}
    for name, file in mine.items():
        file.write_text(f"mine: {name}")
    notes = analyze(run, "rows")
    assert notes == [
        f"{mine[name]} was not made by the lab; it is now {run.path}/{kept}"
        for name, kept in (
            ("report.json", "report-other1.json"),
            ("report.html", "report-other1.html"),
        )
    ]
    assert (run.path / "report-other1.json").read_text() == "mine: report.json"
    assert (run.path / "report-other1.html").read_text() == "mine: report.html"
    assert analyze(run, "heads") == []
    # The name to which a report would be moved is taken too.
    reach(run, 8)
    assert analyze(run, "rows") == [f"the report of step 4 is now {run.path}/report-step4-2.html"]
    assert mine["report-step4.html"].read_text() == "mine: report-step4.html"
    assert names(run) == {"analysis": ["rows"], "analysis-step4-2": ["rows", "heads"]}

"""The report of a run: what was trained, how well, how it got there, and what it learned."""

import json
from pathlib import Path
from typing import Any

from analysis import ANALYSES, QUICK
from analysis.base import Subject
from analysis.examination import Examination, examine, record
from analysis.pages.page import embed_json, fill_template, make_stamp, show_findings
from analysis.record import collect_provenance
from analysis.run import baselines
from lab.files import RunError, explain_write_errors, write, write_json
from lab.training.runs import Run


def write_quick(run: Run) -> Path:
    """Write report.html with the quick analyses, and return its path.

    Raises:
        RunError: when a checkpoint cannot be read, or the folder cannot be written.
    """
    return write_both(run, examine(Subject.of(run), QUICK, lenient=True))


def write_both(run: Run, examination: Examination) -> Path:
    """Write analysis.json and report.html into the run folder; return the latter's path.

    Raises:
        RunError: when the folder cannot be written.
    """
    path = run.path / "report.html"
    page, numbers = render(run, examination), record(examination)
    if path.is_dir():
        raise RunError(f"{path}: is a folder, must be a file")
    with explain_write_errors(run.path):
        write_json(path.with_name("analysis.json"), numbers)
        write(path, page)
    return path


def render(run: Run, examination: Examination) -> str:
    """Return the page as HTML; all text from users is escaped."""
    subject = examination.subject
    standing = baselines.measure(subject)[0]
    sections = [
        (name, ANALYSES[name].TITLE, show_findings(ANALYSES[name], results, make_stamp(subject)))
        for name, results in examination.results.items()
    ]
    left_out = {ANALYSES[name].TITLE: why for name, why in examination.not_applicable.items()}
    return fill_template(
        "report.html.j2",
        subject=subject,
        run=run,
        result=run.read_result() or {},
        newest=max(run.list_checkpoints(), default=0),
        standing=standing,
        headline=standing.headline,
        record=embed_json(_collect_headlines(run, standing)),
        sections=sections,
        left_out=left_out,
        partial=len(examination.seconds) < len(ANALYSES),
        config=json.dumps(run.to_dict(), indent=2, ensure_ascii=False),
        provenance=collect_provenance(run),
    )


def _collect_headlines(run: Run, standing: baselines.Standing) -> dict[str, Any]:
    """Return the numbers from which the page recomputes its headlines: the metrics."""
    rows = run.read_metrics()
    last = rows[-1] if rows else {}
    return {
        "steps": last.get("step"),
        "batch_size": run.train.batch_size,
        "seconds": sum(row["seconds"] for row in rows),
        "scored": standing.scored,
        # The last step is evaluated unless the run was interrupted between two evaluations.
        "accuracy": last.get("test_accuracy", standing.accuracy),
        "loss": last.get("test_loss", (run.read_result() or {}).get("loss")),
    }

"""The report of a run: what was trained, how well, how it got there, and what it learned."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from analysis import ANALYSES, QUICK
from analysis.base import Subject
from analysis.examination import Examination, examine
from analysis.pages.page import embed_json, fill_template
from analysis.pages.report_files import Report, ReportFiles, choose_files, choose_work
from analysis.pages.summary import (
    Section,
    answer_first,
    choose_open,
    pick_key_findings,
    split_sections,
)
from analysis.run import baselines
from analysis.words import count_interval_decimals
from lab.files import RunError, explain_write_errors
from lab.laws.layers import describe_certificate, read_certificate
from lab.training.run import Run


def write_quick(
    run: Run,
    on_begin: Callable[[str], None] = lambda name: None,
    on_note: Callable[[str], None] = lambda text: None,
) -> ReportFiles:
    """Run the quick analyses, add them to the report that the run folder has, and return its files.

    Args:
        run: which run.
        on_begin: called with the name of each analysis before it begins.
        on_note: as for `write_both`.

    Raises:
        RunError: when a checkpoint or a report cannot be read, or the folder cannot be written.
    """
    only, rows = choose_work(run, QUICK, None, None)
    found = examine(Subject.of(run, rows=rows, only=only), only, on_begin, lenient=True)
    return write_both(run, found, on_note)


def write_both(
    run: Run, examination: Examination, on_note: Callable[[str], None] = lambda text: None
) -> ReportFiles:
    """Write numbers and page into the run folder, and return their files.

    They merge with a report of the same weights and rows. Others keep their files, or are moved, as
    are a page and sections that the lab did not make.

    Args:
        run: in whose folder they go.
        examination: what was found.
        on_note: called with a sentence on what goes to another file than usual, and why.

    Raises:
        RunError: when a report cannot be read, or the folder cannot be written.
    """
    new = Report.of(examination)
    with explain_write_errors(run.path):
        files = choose_files(run, new, on_note)
        kept = files.read()
        report = kept.update(new) if kept and kept.matches(new) else new
        page = render(run, examination, report)
        if files.page.is_dir():
            raise RunError(f"{files.page}: is a folder, must be a file")
        files.keep_others(on_note)
        files.write(report, page)
    return files


def render(run: Run, examination: Examination, report: Report | None = None) -> str:
    """Return the page as HTML; all text from users is escaped.

    Args:
        run: what is reported.
        examination: what was found now.
        report: the examination merged with earlier ones; None: the examination alone.
    """
    subject, report = examination.subject, report or Report.of(examination)
    numbers = report.numbers
    standing = baselines.measure(subject)[0]
    sections = [
        (name, analysis.TITLE, report.sections[name])
        for name, analysis in ANALYSES.items()
        if name in report.sections
    ]
    words = {name: results[0].words for name, _, results in sections if results}
    titles = {name: title for name, title, _ in sections}
    shown, aside = split_sections(sections, standing.learned)
    left_out = {
        ANALYSES[name].TITLE: why
        for name, why in numbers["not_applicable"].items()
        if name in ANALYSES
    }
    return fill_template(
        "report.html.j2",
        subject=subject,
        run=run,
        result=run.read_result() or {},
        certified=_describe_certified(run),
        report_rows=numbers["rows"],
        newest=max(run.list_checkpoints(), default=0),
        standing=standing,
        decimals=count_interval_decimals(*(standing.interval or [standing.accuracy or 0.0] * 2)),
        answers=answer_first(standing, words, numbers["not_applicable"]),
        findings=pick_key_findings(words) if standing.learned else [],
        outline=_list_contents(shown, aside),
        record=embed_json(_collect_headlines(run, standing)),
        shown=shown,
        aside=aside,
        present=titles.keys(),
        titles=titles,
        unfolded=choose_open([name for name, _, _ in shown]),
        left_out=left_out,
        partial=len(numbers["seconds"]) < len(ANALYSES),
        config=json.dumps(run.to_dict(), indent=2, ensure_ascii=False),
        provenance={**numbers["provenance"], **_list_earlier(numbers)},
    )


def _describe_certified(run: Run) -> str:
    """Say what the laws found before training; "" if they were not asked."""
    certificate = read_certificate(run.path)
    if certificate is None:
        return ""
    return f"Certified before training: {describe_certificate(certificate)}."


def _list_earlier(numbers: dict[str, Any]) -> dict[str, str]:
    """Return the provenance of analyses that another version or machine measured earlier."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, provenance in numbers.get("earlier", {}).items():
        for what, value in provenance.items():
            if value != numbers["provenance"].get(what):
                found.setdefault((what, value), []).append(name)
    return {f"{what}, of {', '.join(names)}": value for (what, value), names in found.items()}


def _list_contents(shown: Sequence[Section], aside: Sequence[Section]) -> list[tuple[str, str]]:
    """Return the parts of the page in order, each with its title."""
    found = [("summary", "Summary"), *((name, title) for name, title, _ in shown)]
    if aside:
        found.append(("aside", "How the model works"))
    return [*found, ("configuration", "Configuration")]


def _collect_headlines(run: Run, standing: baselines.Standing) -> dict[str, Any]:
    """Return the numbers from which the page recomputes its headlines: the metrics."""
    rows = run.read_metrics()
    last = rows[-1] if rows else {}
    return {
        "steps": last.get("step"),
        "batch_size": run.train.batch_size,
        "seconds": sum(row["seconds"] for row in rows),
        "interval": last.get("test_interval", standing.interval),
        # The last step is evaluated unless the run was interrupted between two evaluations.
        "accuracy": last.get("test_accuracy", standing.accuracy),
        "loss": last.get("test_loss", (run.read_result() or {}).get("loss")),
    }

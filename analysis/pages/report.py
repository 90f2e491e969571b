"""The report of a run: what was trained, how well, how it got there, and what it learned."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from analysis import ANALYSES, QUICK
from analysis.base import Subject
from analysis.examination import Examination, examine
from analysis.pages.page import Shown, embed_json, fill_template
from analysis.pages.report_files import Report, ReportFiles, choose_work, merge
from analysis.run import baselines
from analysis.words import count_interval_decimals
from lab.files import explain_write_errors
from lab.training.certificate import describe_certificate, read_certificate
from lab.training.run import Run

Section = tuple[str, str, list[Shown]]
"""Name, title and figures of an analysis."""
Answer = tuple[str, str, str]
"""A reader's first question, its answer, and the section with the evidence; "" without one."""
TRUST = "leaks"
HOW = "mechanism"
KEY = (
    "errors",
    "generalisation",
    "recall",
    "state_space",
    "dynamic_mask",
    "value_usage",
    "expert_knockout",
    "expert_roles",
    "samples",
)
"""Analyses whose first findings count most, in the order of the list."""
MOST = 5
"""Maximum number of key findings."""
OPEN = ("tokens", "curves", "mechanism")
"""Sections that are unfolded from the start."""
FEW = 3
"""Maximum number of sections of a page on which all are unfolded."""
ALWAYS = ("baselines", "leaks", "rows", "tokens", "curves", "positions", "generalisation")
"""Analyses that say something of a model that has learned nothing, too."""


def write_quick(
    run: Run,
    on_begin: Callable[[str], None] = lambda name: None,
    on_note: Callable[[str], None] = lambda text: None,
) -> ReportFiles:
    """Run the quick analyses, add them to the report that the run folder has, and return its files.

    Args:
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
        on_note: called with a sentence on what goes to another file than usual, and why.

    Raises:
        RunError: when a report cannot be read, or the folder cannot be written.
    """
    with explain_write_errors(run.path):
        files, report = merge(run, Report.of(examination), on_note)
        files.write(report, render(run, examination, report), on_note)
    return files


def render(run: Run, examination: Examination, report: Report | None = None) -> str:
    """Return the page as HTML; all text from users is escaped.

    Args:
        examination: what was found now.
        report: the examination merged with earlier ones; None: the examination alone.
    """
    report = report or Report.of(examination)
    subject, numbers = examination.subject, report.numbers
    standing = baselines.measure(subject)[0]
    titles = {name: a.TITLE for name, a in ANALYSES.items() if name in report.sections}
    sections = [(name, title, report.sections[name]) for name, title in titles.items()]
    leads = {name: shown[0].says for name, _, shown in sections if shown}
    aside = [] if standing.learned else [found for found in sections if found[0] not in ALWAYS]
    shown = [found for found in sections if found not in aside]
    outline = [("summary", "Summary"), *((name, title) for name, title, _ in shown)]
    outline += [("aside", "How the model works")] * bool(aside)
    certificate = read_certificate(run.path)
    return fill_template(
        "report.html.j2",
        subject=subject,
        run=run,
        result=run.read_result() or {},
        certified="" if certificate is None else describe_certificate(certificate),
        report_rows=numbers["rows"],
        newest=max(run.list_checkpoints(), default=0),
        standing=standing,
        decimals=count_interval_decimals(*(standing.interval or [standing.accuracy or 0.0] * 2)),
        answers=answer_first(standing, leads, numbers["not_applicable"]),
        findings=pick_key_findings(leads) if standing.learned else [],
        outline=[*outline, ("configuration", "Configuration")],
        record=embed_json(_collect_headlines(run, standing)),
        shown=shown,
        aside=aside,
        titles=titles,
        unfolded=choose_open([name for name, _, _ in shown]),
        left_out={
            ANALYSES[name].TITLE: why
            for name, why in numbers["not_applicable"].items()
            if name in ANALYSES
        },
        partial=len(numbers["seconds"]) < len(ANALYSES),
        config=json.dumps(run.to_dict(), indent=2, ensure_ascii=False),
        provenance={**numbers["provenance"], **_list_earlier(numbers)},
    )


def answer_first(
    standing: baselines.Standing, leads: Mapping[str, str], not_applicable: Mapping[str, str]
) -> list[Answer]:
    """Answer how the model does it, and why to trust it, or what it has not learned.

    Args:
        leads: what the first finding of each analysis says, by its name.
        not_applicable: why the others do not apply, by name.
    """
    if not standing.learned:
        why = standing.failure or f"Its {standing.measure} is near that of a blind guess."
        return [
            ("How does it do it?", f"There is nothing to explain yet. {why}", "baselines"),
            ("What is there to learn?", standing.rules, "baselines"),
        ]
    how = "Not analyzed: `lab analyze` finds out."
    if HOW in not_applicable:
        how = f"No label applies: {not_applicable[HOW]}."
    trust = " ".join(filter(None, (standing.rules, leads.get(TRUST))))
    return [
        ("How does it do it?", leads.get(HOW, how), HOW),
        ("Why trust it?", trust, TRUST if TRUST in leads else "baselines"),
    ]


def pick_key_findings(leads: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the analyses that matter most, each with its finding in one sentence."""
    return [(name, leads[name]) for name in KEY if name in leads][:MOST]


def choose_open(names: Sequence[str]) -> set[str]:
    """Return which sections are unfolded from the start."""
    return set(names if len(names) <= FEW else OPEN)


def _list_earlier(numbers: dict[str, Any]) -> dict[str, str]:
    """Return the provenance of analyses that another version or machine measured earlier."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, provenance in numbers.get("earlier", {}).items():
        for what, value in provenance.items():
            if value != numbers["provenance"].get(what):
                found.setdefault((what, value), []).append(name)
    return {f"{what}, of {', '.join(names)}": value for (what, value), names in found.items()}


def _collect_headlines(run: Run, standing: baselines.Standing) -> dict[str, Any]:
    """Return the numbers from which the page recomputes its headlines: the metrics."""
    rows = run.read_metrics()
    last = rows[-1] if rows else {}
    return {
        "steps": last.get("step"),
        "seconds": sum(row["seconds"] for row in rows),
        "interval": last.get("test_interval", standing.interval),
        # The last step is evaluated unless the run was interrupted between two evaluations.
        "accuracy": last.get("test_accuracy", standing.accuracy),
        "loss": last.get("test_loss", (run.read_result() or {}).get("loss")),
    }

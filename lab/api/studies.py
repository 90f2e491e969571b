"""The lab's own studies, and the paper's figures: sweeps whose grid the lab wrote."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from analysis.base import Finding, NotApplicableError
from analysis.figures.theme import add_title
from analysis.pages.export import check_figure, save
from analysis.studies import recall as recall_results
from analysis.studies import trainability as trainability_results
from analysis.sweeps import capacity as capacity_results
from lab.api.options import ReproduceOptions, StudyOptions
from lab.api.progress import Display
from lab.api.sweep_settings import PRECISION, SEEDS, read_seeds
from lab.api.sweeping import run_sweep
from lab.files import explain_write_errors
from lab.studies import capacity, recall, trainability, trainability_ssd


@dataclass(frozen=True)
class StudyResult:
    """What a study found.

    Attributes:
        title: of its figure.
        findings: what was measured; empty before the first run has ended.
        left: how many of its runs have no result.
        runs: how many it has.
        settings: of a reproduction, each beside the paper's number.
        note: why nothing was measured; "" if something was.
    """

    title: str
    findings: Sequence[Finding]
    left: int
    runs: int
    settings: Sequence[recall_results.Setting] = ()
    note: str = ""


def reproduce(
    options: ReproduceOptions,
    display: AbstractContextManager[Display] | None = None,
    on_note: Callable[[str], None] = lambda text: None,
) -> StudyResult:
    """Reproduce a figure of the paper, and compare its numbers with ours.

    Raises:
        ValueError, RunError, InterruptedSweepError: as `lab.api.sweeping.run_sweep`.
    """
    sweep = recall.build_study(learning_rates=options.learning_rate, **_read_choices(options))
    table, _ = run_sweep(sweep, options, display, on_note)
    settings = recall_results.collect_settings(table)
    findings = recall_results.measure(settings)
    left, runs = recall_results.count_runs(table)
    return StudyResult("Hard recall", findings, left, runs, settings)


def study(
    options: StudyOptions,
    display: AbstractContextManager[Display] | None = None,
    on_note: Callable[[str], None] = lambda text: None,
) -> StudyResult:
    """Run one of the lab's own studies.

    Raises:
        ValueError, RunError, InterruptedSweepError: as `lab.api.sweeping.run_sweep`.
    """
    chosen = _read_choices(options)
    if options.name == "capacity":
        table, _ = run_sweep(capacity.build_study(**chosen), options, display, on_note)
        findings, note = (), ""
        try:
            findings = capacity_results.measure(table)
        except NotApplicableError as error:
            note = f"No curve: {error}."
        title, left = "How many pairs the state of SSD holds", table["accuracy"].null_count()
        return StudyResult(title, findings, left, len(table), note=note)
    module = trainability if options.name == "trainability" else trainability_ssd
    sweep = module.build_study(**chosen)
    table, _ = run_sweep(sweep, options, display, on_note)
    left = sum(status not in trainability_results.ENDED for status in table["status"])
    return StudyResult(sweep.question, trainability_results.measure(table), left, len(table))


def _read_choices(options: StudyOptions | ReproduceOptions) -> dict[str, Any]:
    """Return the number of seeds and the precision, as studies take them.

    Raises:
        ValueError: for a number of seeds out of its bounds, or a figure of another kind.
    """
    if options.figure is not None:
        check_figure(options.figure, options.force)
    seeds = read_seeds(SEEDS if options.seeds is None else options.seeds)
    return {"seeds": len(seeds), "precision": options.precision or PRECISION}


def save_study(found: StudyResult, options: StudyOptions | ReproduceOptions) -> None:
    """Save the figure of a study's first finding, if one is asked for.

    Raises:
        ValueError: when no run has ended yet, or the file is of another kind.
        RunError: when it cannot be written.
        BrowserError: when a picture cannot be drawn without a browser.
    """
    file = options.figure
    if file is None:
        return
    fig = found.findings[0].figure() if found.findings else None
    if not isinstance(fig, go.Figure):
        raise ValueError(f"figure={file}: no run has ended yet, so there is nothing to draw")
    with explain_write_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        save(add_title(fig, found.title, f"{found.runs - found.left} of {found.runs} runs"), file)

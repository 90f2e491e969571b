"""`lab reproduce` and `lab study`: sweeps whose grid the lab wrote, and what it makes of them."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lab.cli.figures import check_figure, make_figure_option, save_figure
from lab.cli.messages import refuse, report_failures, report_usage_errors, say
from lab.cli.sweep import run_sweep
from lab.cli.sweep_options import SweepOptions, share_options

if TYPE_CHECKING:
    from analysis.base import Finding

FigureFile = Annotated[Path | None, make_figure_option("the study's figure")]


class Figure(StrEnum):
    """The tables and figures of the paper that can be reproduced."""

    recall = "recall"


class Question(StrEnum):
    """The lab's own studies."""

    trainability = "trainability"
    trainability_ssd = "trainability-ssd"
    capacity = "capacity"


@share_options
def reproduce(
    name: Annotated[Figure, typer.Argument(help="Which table or figure.")],
    options: SweepOptions,
    learning_rate: Annotated[
        list[float] | None,
        typer.Option(
            help="Peak learning rate. If repeated, the best on validation rows counts.",
            show_default="the lab's, half and double",
        ),
    ] = None,
    figure: FigureFile = None,
) -> None:
    """Reproduce a figure of the paper, and compare its numbers with ours."""
    from analysis.studies import recall as results
    from lab.cli.console import open_table_console
    from lab.cli.tables.studies import build_recall_table
    from lab.studies import recall

    with report_usage_errors():
        for rate in learning_rate or ():
            if not 0 < rate < float("inf"):
                raise ValueError(f"learning_rate={rate}: must be > 0 and finite")
        chosen = _read_choices(options, figure)
        sweep = recall.build_study(learning_rates=learning_rate or (), **chosen)
    found, _ = run_sweep(sweep, options)
    settings = results.collect_settings(found)
    if settings:
        open_table_console().print(build_recall_table(settings))
    _conclude(results.measure(settings), *results.count_runs(found), figure, "Hard recall")


@share_options
def study(
    name: Annotated[Question, typer.Argument(help="Which study.")],
    options: SweepOptions,
    figure: FigureFile = None,
) -> None:
    """Run one of the lab's own studies.

    trainability: what shortens the first stage of attention's training? trainability-ssd: what lets
    SSD begin to recall? capacity: how many pairs does the state of SSD hold?
    """
    with report_usage_errors():
        chosen = _read_choices(options, figure)
    if name is Question.capacity:
        _study_capacity(options, chosen, figure)
    else:
        _study_trainability(name, options, chosen, figure)


def _read_choices(options: SweepOptions, figure: Path | None) -> dict[str, Any]:
    """Return the number of seeds and the precision, as studies take them.

    Raises:
        ValueError: for a number of seeds out of its bounds, or a figure of another kind.
    """
    from lab.cli.sweep_settings import PRECISION, SEEDS, read_seeds

    if figure is not None:
        check_figure(figure, options.force)
    seeds = read_seeds(SEEDS if options.seeds is None else options.seeds)
    return {"seeds": len(seeds), "precision": options.precision or PRECISION}


def _study_trainability(
    name: Question, options: SweepOptions, chosen: dict[str, Any], figure: Path | None
) -> None:
    from analysis.studies import trainability as results
    from lab.studies import trainability, trainability_ssd

    module = trainability if name is Question.trainability else trainability_ssd
    sweep = module.build_study(**chosen)
    found, _ = run_sweep(sweep, options)
    left = sum(status not in results.ENDED for status in found["status"])
    _conclude(results.measure(found), left, len(found), figure, sweep.question)


def _study_capacity(options: SweepOptions, chosen: dict[str, Any], figure: Path | None) -> None:
    from analysis.base import NotApplicableError
    from analysis.sweeps import capacity as results
    from lab.studies.capacity import build_study

    found, _ = run_sweep(build_study(**chosen), options)
    findings = ()
    try:
        findings = results.measure(found)
    except NotApplicableError as error:
        say(f"No curve: {error}.")
    left = found["accuracy"].null_count()
    _conclude(findings, left, len(found), figure, "How many pairs the state of SSD holds")


def _conclude(
    findings: "Sequence[Finding]", left: int, runs: int, file: Path | None, title: str
) -> None:
    """Print tables and sentences, and save the figure of the first finding if one is asked for.

    Args:
        findings: of the study.
        left: how many of its runs have no result.
        runs: how many it has.
        file: of the figure.
        title: of the figure.
    """
    from lab.cli.console import open_table_console
    from lab.cli.tables.studies import build_numbers_table

    for finding in findings:
        numbers = finding.numbers()
        if numbers is not None:
            open_table_console().print(build_numbers_table(numbers))
        say(finding.says)
    if left:
        say(f"Runs that have no result and are left out: {left} of {runs}.")
    if file is None:
        return
    from plotly.graph_objects import Figure

    fig = findings[0].figure() if findings else None
    if not isinstance(fig, Figure):
        raise refuse(f"figure={file}: no run has ended yet, so there is nothing to draw", 2)
    from analysis.figures.theme import add_title
    from lab.files import explain_write_errors

    with report_failures(), explain_write_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    save_figure(add_title(fig, title, f"{runs - left} of {runs} runs"), file)
    say(file)

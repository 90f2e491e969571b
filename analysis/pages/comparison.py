"""Compare runs on one page: accuracy, mechanism, matrices on the same row, sizes, speed."""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from analysis import matrices, mechanism
from analysis.base import Finding, NotApplicableError, Subject, Table
from analysis.figures import Axis, Curves, Dots, Line, Pairs, curves, pairs
from analysis.mechanism import Mechanism
from analysis.pages.page import (
    PagePart,
    Shown,
    build_page,
    format_value,
    make_stamp,
    show_finding,
)
from analysis.plain import figure_only
from analysis.run import baselines, dynamics
from analysis.run.curves import read_evaluations
from analysis.run.dynamics import Onsets
from analysis.sweeps.seeds import SeedSummary, summarize_seeds
from analysis.words import count_decimals, percent
from lab.files import MOST_PAGE, RunError, explain_write_errors, read, write
from lab.models.anatomy import StateSize, measure_state
from lab.sweeps.table import tabulate_runs
from lab.training.catalog import name_choices
from lab.training.records import find_ending, name_ending
from lab.training.run import Run

LEAST = 2
"""Minimum number of runs that can be compared."""


@dataclass(frozen=True)
class RunColumn:
    """One run of a comparison.

    Attributes:
        name: its folder's name, with as many parent folders as it takes to tell runs apart.
        differs: the fields of its configuration that differ from the first run's by choice.
        stopped: how it ended, a key of `find_ending`.
        state_size: what decoding keeps of a row of the task's length.
        mechanism: how it recalls, in a few words; None where that does not apply.
        test_rows: how many test rows `accuracy` is of.
        held_out_steps: steps at which validation rows of the length trained at were evaluated.
        held_out: accuracy at these steps.
        half_right: the first of them at which half of the answers were right on rows of the task's
            own length; None if there was none.
        stages: row lengths trained at, each with its number of steps.
    """

    name: str
    model: str
    differs: dict[str, Any]
    stopped: str
    accuracy: float | None
    interval: tuple[float, float] | None
    loss: float | None
    steps: int
    seconds: float | None
    rows_per_second: float | None
    parameters: int
    state_size: StateSize
    mechanism: str | None
    test_rows: int
    held_out_steps: Int[np.ndarray, " m"] = figure_only()
    held_out: Float[np.ndarray, " m"] = figure_only()
    half_right: int | None = None
    stages: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class RunAccuracies(Finding):
    """The test accuracy of runs.

    Attributes:
        references: accuracies of the task's baselines, by name.
    """

    runs: tuple[RunColumn, ...]
    references: dict[str, float]
    measure: str = figure_only(default="accuracy")
    reading = (
        "Dots are measured on test rows, with 95 % intervals over other rows. Dotted lines are "
        "rules that need no training."
    )

    @property
    def title(self) -> str:  # type: ignore[override]
        """Of the figure, by what is measured."""
        return f"Test {self.measure}"

    @property
    def says(self) -> str:
        """Say how many runs are above what needs no training."""
        known = [run for run in self.runs if run.interval]
        rivals = {score: name for name, score in self.references.items() if name != "oracle"}
        best = max(rivals, default=0.0)
        above = sum(run.interval[0] > best for run in known if run.interval)
        name = f"“{rivals[best]}”" if rivals else "zero"
        return (
            f"Runs whose interval lies above {name} ({percent(best)}): {above} of {len(known)} "
            "that have a result."
        )

    def figure(self) -> go.Figure | None:
        """Draw a dot and an interval per run, the first run on top."""
        known = [run for run in self.runs if run.accuracy is not None and run.interval]
        if not known:
            return None
        values = np.array([run.accuracy for run in known])
        dots = Dots(self.title.lower(), values, np.array([run.interval for run in known]))
        axis = Axis(f"{self.measure} at scored positions", "share")
        panel = Pairs([dots], axis, levels=_name_levels(self.references))
        return pairs([run.name for run in known], panel)


@dataclass(frozen=True)
class RunCurves(Finding):
    """The accuracy of runs by training step.

    Attributes:
        references: accuracies of the task's baselines, by name.
    """

    runs: tuple[RunColumn, ...]
    references: dict[str, float]
    measure: str = figure_only(default="accuracy")
    reading = (
        "Measured on held-out rows of the length that a run trains on at that step. Dotted lines "
        "are rules that need no training."
    )

    @property
    def title(self) -> str:  # type: ignore[override]
        """Of the figure, by what is measured."""
        return f"{self.measure.capitalize()} by training step"

    @property
    def says(self) -> str:
        """Say in how many runs half of the answers are right, or half is explained."""
        reached = sum(run.half_right is not None for run in self.runs)
        half = "half of the answers were right"
        if self.measure != "accuracy":
            half = f"{self.measure} was above a half"
        return f"Runs in which {half} at full row length: {reached} of {len(self.runs)}."

    def numbers(self) -> Table:
        """Return the step of each run at which half is right, and its row lengths."""
        lengths = [", ".join(f"{n:,} for {steps:,}" for n, steps in r.stages) for r in self.runs]
        return Table(
            ("run", "half right at step", "row lengths, each for how many steps"),
            tuple(
                (run.name, _format(run.half_right), of or "–")
                for run, of in zip(self.runs, lengths, strict=True)
            ),
        )

    def figure(self) -> go.Figure | None:
        """Draw accuracy by step, a line per run."""
        known = [run for run in self.runs if len(run.held_out)]
        if not known:
            return None
        lines = [Line(run.name, run.held_out_steps, run.held_out) for run in known]
        levels = _name_levels(self.references)
        panel = Curves(lines, Axis(self.measure, "share"), levels=levels, height=300)
        return curves([panel], Axis("training step", "count"))


def _name_levels(references: Mapping[str, float]) -> dict[str, float]:
    return {f"{name}, {percent(score)}": score for name, score in references.items()}


@dataclass(frozen=True)
class Seeds:
    """Runs that differ in nothing but the seed.

    Attributes:
        onsets: when each quantity changes, run by run; None where that cannot be followed.
        missing: why it cannot be followed; empty where it can.
    """

    names: tuple[str, ...]
    summary: SeedSummary
    onsets: Onsets | None
    missing: str


@dataclass(frozen=True)
class Comparison:
    """Several runs and how they differ.

    Attributes:
        seeds: one for each configuration that was trained from several seeds.
        task: the task's name if all runs have the same task, else None.
        references: accuracy of the oracle, the best shortcut and chance on the common task; empty
            where tasks differ.
    """

    runs: tuple[RunColumn, ...]
    seeds: tuple[Seeds, ...]
    task: str | None
    references: dict[str, float]


def compare(subjects: Sequence[Subject]) -> Comparison:
    """Compare runs.

    Raises:
        RunError: when a result cannot be read.
    """
    runs = [_get_run(subject) for subject in subjects]
    same = all(run.task == runs[0].task for run in runs)
    references = {}
    if same:
        references = baselines.choose_references(baselines.score_baselines(runs[0]))
    names = name_apart([run.path for run in runs])
    named = dict(zip(names, subjects, strict=True))
    return Comparison(
        runs=tuple(summarize_run(subject, name, runs[0]) for name, subject in named.items()),
        seeds=tuple(map(_compare_seeds, _group_seeds(named))),
        task=runs[0].task.name if same else None,
        references=references,
    )


def summarize_run(subject: Subject, name: str, first: Run) -> RunColumn:
    """Return what a comparison says of a subject's run; `first` is the run it is compared with.

    Raises:
        RunError: when the run's records cannot be read.
    """
    run = _get_run(subject)
    result, metrics = run.read_result() or {}, run.read_metrics()
    evaluated, stages, full = read_evaluations(run), metrics.stages, run.task.seq_len
    began = next((stage.began for stage in stages if stage.seq_len == full), math.inf)
    half = evaluated.steps[(evaluated.steps > began) & (evaluated.accuracy >= 0.5)]
    try:
        found = mechanism.measure(subject)
    except NotApplicableError:
        found = []
    labels = [result.label for result in found if isinstance(result, Mechanism)]
    return RunColumn(
        name=name,
        model=run.model.name,
        differs=_find_differences(run, first),
        stopped=find_ending(result),
        accuracy=result.get("accuracy"),
        interval=baselines.read_interval(run),
        loss=result.get("loss"),
        steps=result.get("steps", int(evaluated.steps[-1]) if len(evaluated.steps) else 0),
        seconds=result.get("seconds"),
        rows_per_second=result.get("rows_per_second"),
        parameters=subject.model.parameter_count(),
        state_size=measure_state(subject.model, full),
        mechanism=labels[0] if labels else None,
        test_rows=run.train.test_rows,
        held_out_steps=evaluated.steps,
        held_out=evaluated.accuracy,
        half_right=int(half[0]) if len(half) else None,
        stages=tuple((stage.seq_len, stage.steps) for stage in stages),
    )


def name_apart(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of paths that tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            return names
    raise AssertionError("whole paths tell paths apart")


def _find_differences(run: Run, first: Run) -> dict[str, Any]:
    """Return the fields of a configuration that differ from the first run's by choice."""
    ours, theirs, chosen = run.to_dict(), first.to_dict(), name_choices([run, first])
    return {
        name: value
        for part in ("task", "model", "train")
        for name, value in ours[part].items()
        if name in chosen and theirs[part].get(name) != value
    }


def open_on_same_rows(runs: Sequence[Run], rows: int | None = None) -> list[Subject]:
    """Return one subject per run, all on the first run's rows if they have the same task.

    Raises:
        ValueError: for fewer than two runs, or one given twice.
        RunError: when weights cannot be read.
    """
    if len(runs) < LEAST:
        raise ValueError(f"runs={len(runs)}: must be at least {LEAST} to compare")
    folders = [run.path.resolve() for run in runs]
    for folder in folders:
        if folders.count(folder) > 1:
            raise ValueError(f"{folder.name}: is given twice, must be given once")
    subjects = [Subject.of(run, rows=rows) for run in runs]
    if any(run.task != runs[0].task for run in runs):
        return subjects
    first = subjects[0]
    return [replace(subject, batch=first.batch, seed=first.seed) for subject in subjects]


def _get_run(subject: Subject) -> Run:
    assert subject.run is not None
    return subject.run


def _group_seeds(subjects: dict[str, Subject]) -> list[dict[str, Subject]]:
    """Group subjects by configuration without the seed; keep groups of two seeds or more."""
    groups: dict[str, dict[int, tuple[str, Subject]]] = {}
    for name, subject in subjects.items():
        config = _get_run(subject).to_dict()
        train = dict(config["train"])
        seed = train.pop("seed")
        key = json.dumps([config["task"], config["model"], train], sort_keys=True)
        groups.setdefault(key, {}).setdefault(seed, (name, subject))
    return [dict(by_seed.values()) for by_seed in groups.values() if len(by_seed) > 1]


def _compare_seeds(group: Mapping[str, Subject]) -> Seeds:
    summary = summarize_seeds(tabulate_runs([_get_run(s) for s in group.values()]))
    onsets, missing = None, ""
    try:
        onsets = dynamics.compare_runs(list(group.values()))
    except NotApplicableError as error:
        missing = str(error)
    return Seeds(tuple(group), summary, onsets, missing)


def draw_matrices(
    subjects: Sequence[Subject], names: Sequence[str]
) -> list[tuple[int, list[Shown]]]:
    """Draw each layer's matrices, one run after the other, each on its first row.

    Matrices of one form have one colour scale, in all layers and runs.
    """
    found = []
    for subject, name in zip(subjects, names, strict=True):
        with suppress(NotApplicableError):
            results = matrices.measure(replace(subject, batch=subject.batch[:1]))
            found += [(name, subject, result) for result in results if not result.cropped]
    layers: dict[int, list[Shown]] = {}
    for name, subject, result in found:
        if result.picture is not None:
            alike = [r.picture for _, _, r in found if r.picture and r.form == result.form]
            picture = replace(
                result.picture,
                bound=max(picture.bound for picture in alike),
                signed=any(picture.signed for picture in alike),
            )
            result = replace(result, picture=picture)
        layers.setdefault(result.layer, []).append(
            show_finding(result, make_stamp(subject), of=name)
        )
    return sorted(layers.items())


def render(subjects: Sequence[Subject], found: Comparison, mark: str = "") -> str:
    """Return the page as HTML; all text from users is escaped.

    Args:
        mark: what tells the page from another comparison (`make_mark`).
    """
    names = [run.name for run in found.runs]
    title = f"{len(names)} runs of {found.task}" if found.task else f"{len(names)} runs"
    measure = " or ".join(sorted({subject.task.measure for subject in subjects}))
    accuracies = RunAccuracies(found.runs, found.references, measure)
    by_step = RunCurves(found.runs, found.references, measure)
    shown = [show_finding(f, title) for f in (accuracies, by_step)]
    order = "In which order things change, over seeds"
    orders, untold = [], []
    for i, seeds in enumerate(found.seeds, 1):
        alike = ", ".join(seeds.names)
        if seeds.onsets:
            orders.append((f"order-{i}", show_finding(seeds.onsets, alike, of=alike)))
        else:
            untold.append(f"{alike}: {seeds.missing}.")
    parts = [
        PagePart("runs", "The runs", table=_tabulate(found.runs, measure)),
        PagePart("seeds", "Over seeds", table=_tabulate_seeds(found.seeds)),
        PagePart(
            "accuracy",
            "How good, how fast",
            figures=[(f"compared-{i}", one) for i, one in enumerate(shown, 1)],
        ),
        PagePart("orders", order, untold, figures=orders),
    ]
    rows = "All are on the same test row." if found.task else "Each is on a row of its own task."
    for layer, results in draw_matrices(subjects, names):
        parts.append(
            PagePart(
                f"layer-{layer}",
                f"What layer {layer} mixes",
                (f"{rows} Matrices of one kind have one colour scale, in all layers and runs.",),
                figures=[(f"layer-{layer}-{i}", one) for i, one in enumerate(results, 1)],
                side=True,
            )
        )
    return build_page("Comparison", title, accuracies.says, parts, mark)


def _tabulate(runs: Sequence[RunColumn], measure: str) -> Table:
    """Return what sets runs apart, and how they ended."""
    shares = [share for run in runs for share in (run.accuracy or 0.0, *(run.interval or ()))]
    decimals = count_decimals(shares)
    columns = "run", "model", "differs in", measure, "95 %", "recalls by", "steps", "seconds"
    return Table(
        (*columns, "rows/s", "parameters", "state of a row", "ended"),
        tuple(
            (
                run.name,
                run.model,
                ", ".join(f"{name}={format_value(v)}" for name, v in run.differs.items()) or "–",
                "–" if run.accuracy is None else percent(run.accuracy, decimals),
                " … ".join(percent(end, decimals) for end in run.interval or ()) or "–",
                run.mechanism or "–",
                f"{run.steps:,}",
                _format(run.seconds),
                _format(run.rows_per_second),
                f"{run.parameters:,}",
                str(run.state_size),
                name_ending(run.stopped),
            )
            for run in runs
        ),
    )


def _tabulate_seeds(seeds: Sequence[Seeds]) -> Table | None:
    """Return accuracy and steps over seeds; None where no runs differ in the seed alone."""
    columns = "runs", "solved", "mean accuracy", "95 % over seeds and rows"
    rows = tuple(
        (
            ", ".join(each.names),
            f"{len(found.solved)} of {len(found.runs)}",
            "–" if found.mean is None else percent(found.mean),
            " … ".join(map(percent, found.interval or ())) or "–",
            _format(found.median),
            " … ".join(map(_format, found.within)) if found.median else "–",
        )
        for each in seeds
        for found in (each.summary,)
    )
    return Table((*columns, "median steps until solved", "95 % over seeds"), rows) if rows else None


def _format(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def make_mark(runs: Sequence[Run], rows: int | None) -> str:
    """Return what pages of the same runs, on as many rows, have in common."""
    parts = [*(str(run.path.resolve()) for run in runs), str(rows)]
    return f"compares {hashlib.sha256(os.fsencode('|'.join(parts))).hexdigest()[:16]}"


def choose_page(runs: Sequence[Run], rows: int | None = None) -> Path:
    """Return compare.html; where another file has that name, compare-2.html, and so on."""
    mark = make_mark(runs, rows)
    for number in count(1):
        path = Path("compare.html" if number == 1 else f"compare-{number}.html")
        if not os.path.lexists(path):
            return path
        with suppress(OSError, RunError):
            if mark.encode() in read(path, MOST_PAGE):
                return path
    raise AssertionError("some name is free")


def write_comparison(runs: Sequence[Run], path: Path, rows: int | None = None) -> Comparison:
    """Compare runs and write the page.

    Raises:
        ValueError: for fewer than two runs.
        RunError: when a run cannot be read, or the page cannot be written.
    """
    if path.is_dir():
        raise RunError(f"out={path}: is a folder, must be a file")
    if not os.access(path.parent, os.W_OK):
        why = "may not be written to" if path.parent.exists() else "does not exist"
        raise RunError(f"out={path}: cannot be written: the folder {path.parent} {why}")
    subjects = open_on_same_rows(runs, rows)
    found = compare(subjects)
    page = render(subjects, found, make_mark(runs, rows))
    with explain_write_errors(path):
        write(path, page)
    return found

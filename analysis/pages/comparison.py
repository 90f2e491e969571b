"""Runs side by side: accuracy, mechanism, matrices on the same row, parameters, speed."""

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from analysis import matrices
from analysis.base import NotApplicableError, Subject, Words
from analysis.mechanism import results as mechanism
from analysis.pages.page import Shown, fill_template, make_stamp, show_figure
from analysis.plots.style import DASHES, MUTED, SYMBOLS, new_figure
from analysis.record import figure_only, to_plain
from analysis.run import baselines, dynamics
from analysis.run.onsets import Onsets
from analysis.words import percent
from lab.files import RunError, explain_write_errors, write
from lab.intervals import wilson
from lab.training.runs import Run

LEAST = 2


@dataclass(frozen=True)
class RunColumn:
    """One of the runs.

    Attributes:
        name: its folder's name, with as much of the path before it as tells it from the others.
        model: stack, or the user's mixer.
        differs: what sets its configuration apart from the first run's, by field.
        stopped: how it ended; "unfinished" without a result.
        accuracy: on the test split, in [0, 1]; None if unknown.
        interval: 95 % Wilson interval of it.
        loss: nats.
        steps: training steps.
        seconds: of training.
        rows_per_second: of training.
        parameters: how many numbers the model holds.
        mechanism: how it recalls; None where that does not apply.
        held_out_steps: steps at which held-out rows, of the length then trained at, were evaluated.
        held_out: accuracy there.
        stages: row lengths trained at, each with the steps it took.
        full_from: steps after which rows had the task's own length; None if they never had.
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
    mechanism: str | None
    held_out_steps: Int[np.ndarray, " m"] = figure_only()
    held_out: Float[np.ndarray, " m"] = figure_only()
    stages: tuple[tuple[int, int], ...] = ()
    full_from: int | None = 0


@dataclass(frozen=True)
class Order:
    """When things change in runs that differ in nothing but the seed.

    Attributes:
        names: the runs'.
        onsets: when, run by run; None where that cannot be followed.
        missing: why it cannot; empty where it can.
    """

    names: tuple[str, ...]
    onsets: Onsets | None
    missing: str


@dataclass(frozen=True)
class Comparison:
    """Runs beside each other.

    Attributes:
        runs: in the order given.
        orders: one for each configuration that was trained from several seeds.
        task: the task's name where all have the same, else None.
        same_row: whether matrices are of the same row for all.
        references: chance and oracle of the one task; empty where tasks differ.
    """

    runs: tuple[RunColumn, ...]
    orders: tuple[Order, ...]
    task: str | None
    same_row: bool
    references: dict[str, float]


def compare(subjects: Sequence[Subject]) -> Comparison:
    """Compare runs.

    Raises:
        RunError: when a result cannot be read.
    """
    runs = [_run(subject) for subject in subjects]
    same = all(run.task == runs[0].task for run in runs)
    references = {}
    if same:
        rules = baselines.score_baselines(runs[0])
        references = {name: rules[name] for name in ("oracle", "chance")}
    names = name_apart([run.path for run in runs])
    return Comparison(
        runs=tuple(
            _compared(subject, name, runs[0]) for subject, name in zip(subjects, names, strict=True)
        ),
        orders=tuple(_order(group) for group in _seeds(dict(zip(names, subjects, strict=True)))),
        task=runs[0].task.name if same else None,
        same_row=same,
        references=references,
    )


def open_on_same_rows(runs: Sequence[Run], rows: int | None = None) -> list[Subject]:
    """Return the subjects of runs: where all have one task, on the first run's rows.

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


def name_apart(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that tell them apart; the same path keeps its name."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            return names
    raise AssertionError("whole paths tell paths apart")


def _run(subject: Subject) -> Run:
    assert subject.run is not None
    return subject.run


def _compared(subject: Subject, name: str, first: Run) -> RunColumn:
    run = _run(subject)
    result, metrics = run.read_result() or {}, run.read_metrics()
    evaluated, stages, full = metrics.evaluations, metrics.stages, run.task.seq_len
    accuracy = result.get("accuracy")
    scored = baselines.count_scored_positions(run) if accuracy is not None else 0
    try:
        found = mechanism.measure(subject)
    except NotApplicableError:
        found = []
    labels = [result.label for result in found if isinstance(result, mechanism.Mechanism)]
    return RunColumn(
        name=name,
        model=run.model.model or run.model.stack,
        differs=_differs(run, first),
        stopped=result.get("stopped", "unfinished"),
        accuracy=accuracy,
        interval=None if accuracy is None else wilson(accuracy, scored),
        loss=result.get("loss"),
        steps=result.get("steps", evaluated[-1]["step"] if evaluated else 0),
        seconds=result.get("seconds"),
        rows_per_second=result.get("rows_per_second"),
        parameters=subject.model.parameter_count(),
        mechanism=labels[0] if labels else None,
        held_out_steps=np.array([row["step"] for row in evaluated], dtype=np.int64),
        held_out=np.array([row["accuracy"] for row in evaluated], dtype=np.float64),
        stages=tuple((stage.seq_len, stage.steps) for stage in stages),
        full_from=next((stage.began for stage in stages if stage.seq_len == full), None),
    )


def _differs(run: Run, first: Run) -> dict[str, Any]:
    """Return the fields of a configuration that are not as in the first run's."""
    ours, theirs = run.to_dict(), first.to_dict()
    return {
        name: value
        for part in ("task", "model", "train")
        for name, value in ours[part].items()
        if theirs[part].get(name) != value
    }


def _seeds(subjects: dict[str, Subject]) -> list[dict[str, Subject]]:
    """Return the subjects by name, in groups of one configuration and several seeds."""
    groups: dict[str, dict[int, tuple[str, Subject]]] = {}
    for name, subject in subjects.items():
        config = _run(subject).to_dict()
        train = dict(config["train"])
        seed = train.pop("seed")
        key = json.dumps([config["task"], config["model"], train], sort_keys=True)
        groups.setdefault(key, {}).setdefault(seed, (name, subject))
    return [dict(by_seed.values()) for by_seed in groups.values() if len(by_seed) > 1]


def _order(group: dict[str, Subject]) -> Order:
    names = tuple(group)
    try:
        return Order(names, dynamics.compare_runs(list(group.values())), "")
    except NotApplicableError as error:
        return Order(names, None, str(error))


def show_order(order: Order) -> Shown:
    """Return in which order things change over seeds, or why that is not known, for a page."""
    runs = ", ".join(order.names)
    if order.onsets is None:
        title = f"{runs} · Not followed"
        says = f"{order.missing[:1].upper()}{order.missing[1:]}."
        return show_figure(Words(title, says, "", says), None, runs)
    words = dynamics.describe(order.onsets)
    words = replace(words, title=f"{runs} · {words.title}")
    return show_figure(words, dynamics.draw(order.onsets), runs)


def describe_accuracy(found: Comparison) -> Words:
    """Put who is best in words, by intervals."""
    known = [run for run in found.runs if run.accuracy is not None]
    title = "Test accuracy"
    reading = "Whiskers are 95 % Wilson intervals, as if scored positions were independent."
    if not known:
        says = "None of these runs has a result yet."
        return Words(title, says, reading, says)
    best = max(known, key=lambda run: run.accuracy or 0.0)
    assert best.interval is not None
    rivals = [run for run in known if run is not best and run.interval is not None]
    level = [run.name for run in rivals if run.interval and run.interval[1] >= best.interval[0]]
    chance = found.references.get("chance")
    if chance is not None and best.interval[0] <= chance:
        says = f"No run is sure to stand above chance, {percent(chance)}."
        return Words(title, says, reading, f"Dots of test accuracy. {says}")
    says = f"{best.name} is most often right, {percent(best.accuracy or 0.0)}"
    if level:
        says += f"; {', '.join(level)} cannot be told from it."
    elif rivals:
        second = max(rivals, key=lambda run: run.accuracy or 0.0)
        says += f", clear of {second.name}, {percent(second.accuracy or 0.0)}."
    else:
        says += "; no other run has a result."
    listed = ", ".join(f"{run.name} {percent(run.accuracy or 0.0)}" for run in known)
    return Words(title, says, reading, f"Dots of test accuracy: {listed}.")


def draw_accuracy(found: Comparison) -> go.Figure:
    """Draw a dot with its interval a run, first run on top."""
    names = [html.escape(run.name) for run in found.runs]
    drawing = new_figure(height=130 + 34 * len(names))
    for i, run in enumerate(found.runs):
        if run.accuracy is None or run.interval is None:
            continue
        drawing.add_scatter(
            x=[run.accuracy],
            y=[names[i]],
            mode="markers",
            marker={"size": 10, "symbol": SYMBOLS[i % len(SYMBOLS)]},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [run.interval[1] - run.accuracy],
                "arrayminus": [run.accuracy - run.interval[0]],
            },
            hovertemplate=f"{names[i]}: %{{x:.2%}}<extra></extra>",
        )
        drawing.add_annotation(
            text=percent(run.accuracy), x=1.03, y=names[i], xanchor="left", yanchor="middle"
        )
    for name, level in found.references.items():
        drawing.add_vline(level, line={"color": MUTED, "dash": "dot"}, layer="below")
        drawing.add_annotation(
            text=name,
            x=level,
            y=1,
            yref="paper",
            yanchor="bottom",
            xanchor="left" if level < 0.5 else "right",
        )
    drawing.update_xaxes(range=[-0.02, 1.2], tickvals=[0, 0.25, 0.5, 0.75, 1], tickformat=".0%")
    drawing.update_xaxes(title_text="accuracy at scored positions")
    drawing.update_yaxes(
        categoryorder="array", categoryarray=names[::-1], automargin="left", showgrid=False
    )
    return drawing.update_layout(showlegend=False)


def describe_curves(found: Comparison) -> Words:
    """Put who learns first in words: the first evaluation at which half is right."""
    half = {}
    for run in found.runs:
        right = run.held_out >= 0.5
        if run.full_from is None:
            continue
        right &= run.held_out_steps > run.full_from
        if right.any():
            half[run.name] = int(run.held_out_steps[right.argmax()])
    never = [run.name for run in found.runs if run.name not in half]
    ordered = sorted(half, key=half.__getitem__)
    said = [f"{name} by step {half[name]:,}" for name in ordered]
    if never:
        said.append(f"{', '.join(never)} never")
    says = f"Half of the answers are right at full row length: {'; '.join(said)}."
    reading = "Accuracy on held-out rows of the length then trained at, one line a run."
    grown = [run for run in found.runs if len(run.stages) > 1]
    if grown:
        says += " Steps at each row length: "
        says += "; ".join(
            f"{run.name} {', '.join(f'{steps:,} at {length:,}' for length, steps in run.stages)}"
            for run in grown
        )
        says += "."
    return Words("Accuracy by training step", says, reading, f"Lines of accuracy. {says}")


def draw_curves(found: Comparison) -> go.Figure:
    """Draw accuracy by step, a colour, a dash and a symbol a run."""
    drawing = new_figure(height=360 + 14 * len(found.runs))
    for i, run in enumerate(found.runs):
        drawing.add_scatter(
            x=run.held_out_steps,
            y=run.held_out,
            mode="lines+markers",
            name=html.escape(run.name),
            line={"dash": DASHES[i % len(DASHES)], "width": 2},
            marker={"symbol": SYMBOLS[i % len(SYMBOLS)], "size": 6},
            hovertemplate=f"{html.escape(run.name)}, step %{{x:,}}: %{{y:.2%}}<extra></extra>",
        )
    for level in found.references.values():
        drawing.add_hline(level, line={"color": MUTED, "dash": "dot"}, layer="below")
    drawing.update_xaxes(title_text="training step", tickformat=",", rangemode="tozero")
    drawing.update_yaxes(title_text="accuracy", tickformat=".0%", range=[-0.03, 1.05])
    return drawing.update_layout(margin_t=64 + 14 * len(found.runs))


def draw_matrices(
    subjects: Sequence[Subject], names: Sequence[str]
) -> list[tuple[int, list[Shown]]]:
    """Return each layer's matrices, a run after the other, on its row."""
    layers: dict[int, list[Shown]] = {}
    for subject, name in zip(subjects, names, strict=True):
        try:
            results = matrices.measure(replace(subject, batch=subject.batch[:1]))
        except NotApplicableError:
            continue
        for result in results:
            if not result.cropped:
                words = matrices.describe(result)
                words = replace(words, title=f"{name} · {words.title}")
                entry = show_figure(words, matrices.draw(result), make_stamp(subject))
                layers.setdefault(result.layer, []).append(entry)
    return sorted(layers.items())


def render(subjects: Sequence[Subject], found: Comparison) -> str:
    """Return the page as HTML; all text from users is escaped."""
    names = [run.name for run in found.runs]
    title = f"{len(names)} runs of {found.task}" if found.task else f"{len(names)} runs"
    accuracies = show_figure(describe_accuracy(found), draw_accuracy(found), title)
    curves = show_figure(describe_curves(found), draw_curves(found), title)
    return fill_template(
        "compare.html.j2",
        title=title,
        found=found,
        figures=[accuracies, curves],
        orders=[show_order(order) for order in found.orders],
        grid=draw_matrices(subjects, names),
    )


def write_comparison(runs: Sequence[Run], path: Path, rows: int | None = None) -> Comparison:
    """Compare runs and write the page.

    Raises:
        ValueError: for fewer than two runs.
        RunError: when a run cannot be read, or the page cannot be written.
    """
    subjects = open_on_same_rows(runs, rows)
    found = compare(subjects)
    page = render(subjects, found)
    if path.is_dir():
        raise RunError(f"out={path}: is a folder, must be a file")
    with explain_write_errors(path):
        write(path, page)
    return found


def as_json(found: Comparison) -> str:
    """Return a comparison as JSON."""
    return json.dumps(to_plain(found), ensure_ascii=False)

"""Compare runs on one page: accuracy, mechanism, matrices on the same row, parameters, speed."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import plotly.graph_objects as go

from analysis import matrices
from analysis.base import Finding, NotApplicableError, Subject, Words
from analysis.figures.picture import Picture
from analysis.matrices import LayerMatrix
from analysis.pages.page import Shown, fill_template, make_stamp, show_figure
from analysis.pages.ranking import Ranking, rank
from analysis.pages.run_accuracy import RunAccuracies, RunCurves
from analysis.pages.run_columns import RunColumn, name_apart, summarize_run
from analysis.plain import to_plain
from analysis.run import baselines, dynamics
from analysis.run.dynamics import Onsets
from analysis.words import capitalize, count_decimals
from lab.files import RunError, explain_write_errors, write
from lab.training.run import Run

LEAST = 2
"""Minimum number of runs that can be compared."""


@dataclass(frozen=True)
class SeedOrder(Finding):
    """In which order quantities change in runs that differ in nothing but the seed.

    Attributes:
        names: the runs' names.
        onsets: when each quantity changes, run by run; None where that cannot be followed.
        missing: why it cannot be followed; empty where it can.
    """

    names: tuple[str, ...]
    onsets: Onsets | None
    missing: str

    def describe(self) -> Words:
        """Say in which order quantities change, or why that is not known."""
        runs = ", ".join(self.names)
        if self.onsets is None:
            says = f"{capitalize(self.missing)}."
            return Words(f"{runs} · Not followed", says, "", says)
        words = self.onsets.describe()
        return replace(words, title=f"{runs} · {words.title}")

    def draw(self) -> go.Figure | None:
        """Draw when quantities change; None where that is not known."""
        return None if self.onsets is None else self.onsets.draw()


@dataclass(frozen=True)
class Comparison:
    """Several runs and how they differ.

    Attributes:
        runs: in the order given.
        orders: one for each configuration that was trained from several seeds.
        task: the task's name if all runs have the same task, else None.
        same_row: whether all matrices are computed on the same row.
        references: accuracy of the oracle, the best shortcut and chance on the common task; empty
            where tasks differ.
        ranking: which settings are better than which, or why that is not known.
    """

    runs: tuple[RunColumn, ...]
    orders: tuple[SeedOrder, ...]
    task: str | None
    same_row: bool
    references: dict[str, float]
    ranking: Ranking


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
    return Comparison(
        runs=tuple(
            summarize_run(subject, name, runs[0])
            for subject, name in zip(subjects, names, strict=True)
        ),
        orders=tuple(
            _find_order(group) for group in _group_seeds(dict(zip(names, subjects, strict=True)))
        ),
        task=runs[0].task.name if same else None,
        same_row=same,
        references=references,
        ranking=rank(runs),
    )


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


def _find_order(group: dict[str, Subject]) -> SeedOrder:
    names = tuple(group)
    try:
        return SeedOrder(names, dynamics.compare_runs(list(group.values())), "")
    except NotApplicableError as error:
        return SeedOrder(names, None, str(error))


def draw_matrices(
    subjects: Sequence[Subject], names: Sequence[str]
) -> list[tuple[int, list[Shown]]]:
    """Draw each layer's matrices, one run after the other, each on its first row.

    Matrices of one form have one colour scale, in all layers and runs.
    """
    found: list[tuple[str, Subject, LayerMatrix]] = []
    for subject, name in zip(subjects, names, strict=True):
        try:
            results = matrices.measure(replace(subject, batch=subject.batch[:1]))
        except NotApplicableError:
            continue
        found += [(name, subject, result) for result in results if not result.cropped]
    pictures: dict[str, list[Picture]] = {}
    for _, _, result in found:
        if result.picture is not None:
            pictures.setdefault(result.form, []).append(result.picture)
    layers: dict[int, list[Shown]] = {}
    for name, subject, result in found:
        if result.picture is not None:
            alike = pictures[result.form]
            picture = replace(
                result.picture,
                bound=max(picture.bound for picture in alike),
                signed=any(picture.signed for picture in alike),
            )
            result = replace(result, picture=picture)
        words = matrices.describe(result)
        words = replace(words, title=f"{name} · {words.title}")
        entry = show_figure(words, matrices.draw(result), make_stamp(subject))
        layers.setdefault(result.layer, []).append(entry)
    return sorted(layers.items())


def render(subjects: Sequence[Subject], found: Comparison, mark: str = "") -> str:
    """Return the page as HTML; all text from users is escaped.

    Args:
        subjects: the runs, with their rows.
        found: how they differ.
        mark: what tells the page from another comparison (`make_mark`).
    """
    names = [run.name for run in found.runs]
    title = f"{len(names)} runs of {found.task}" if found.task else f"{len(names)} runs"
    accuracies = RunAccuracies(found.runs, found.references)
    curves = RunCurves(found.runs, found.references)
    orders = [
        show_figure(order.describe(), order.draw(), ", ".join(order.names))
        for order in found.orders
    ]
    grid = draw_matrices(subjects, names)
    outline = [("summary", "Summary"), ("runs", "The runs"), ("accuracy", "How good, how fast")]
    outline += [("orders", "In which order things change")] * bool(orders)
    outline += [("matrices", "What each layer mixes")] * bool(grid)
    return fill_template(
        "compare.html.j2",
        title=title,
        mark=mark,
        found=found,
        figures=[
            show_figure(f.describe(), f.draw(), title) for f in (found.ranking, accuracies, curves)
        ],
        orders=orders,
        grid=grid,
        decimals=count_decimals(
            share for run in found.runs for share in (run.accuracy or 0.0, *(run.interval or ()))
        ),
        outline=outline,
    )


def make_mark(runs: Sequence[Run], rows: int | None) -> str:
    """Return what pages of the same runs, on as many rows, have in common."""
    parts = [*(str(run.path.resolve()) for run in runs), str(rows)]
    return f"compares {hashlib.sha256(os.fsencode('|'.join(parts))).hexdigest()[:16]}"


def choose_page(runs: Sequence[Run], rows: int | None = None) -> Path:
    """Return compare.html; where another file has that name, compare-2.html, and so on."""
    mark = make_mark(runs, rows)
    for number in count(1):
        path = Path("compare.html" if number == 1 else f"compare-{number}.html")
        if not path.exists() or mark in path.read_text(encoding="utf-8", errors="replace"):
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


def as_json(found: Comparison) -> str:
    """Return a comparison as JSON."""
    return json.dumps(to_plain(found), ensure_ascii=False)

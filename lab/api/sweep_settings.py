"""Reading a sweep: from the words of `lab sweep`, from a file, or from Python."""

import csv
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from lab.api.settings import Span, read, read_settings
from lab.config import ModelConfig, Runtime, TrainConfig
from lab.files import read_toml
from lab.suite.suites import Suite
from lab.sweeps.sweep import Axis, Cell, Sweep, combine, make_axis, merge, read_number
from lab.sweeps.table import MEASURED
from tasks import TASKS
from tasks.near_names import suggest

SEEDS, MOST_SEEDS = 3, 1_000
PRECISION = "fp32"
OTHER_WAYS = {"seed": "seeds", "options": "S.d_state=64", "log": "lab TASK --log"}
"""Options of `lab TASK` that a sweep does not take, and what to use in place of each."""
ONE_PRECISION = "precision=auto: would differ from run to run; choose fp32 or bf16"
MOST_NAMED = 4
"""Cells that a message names."""
PARTS = ("task", "seeds", "lengths", "options", "grid")
"""The parts of a file."""


@dataclass(frozen=True)
class SweepSettings:
    """What a user asks of a sweep.

    Attributes:
        task: the task's name.
        grid: the values of each axis; or, by a name for each, the options that it stands for;
            empty: runs that differ in the seed alone.
        fixed: options of all runs.
        seeds: of the runs of each setting.
        lengths: row lengths at which runs are evaluated; empty: that of the task.
        name: of the sweep, and of its folder; empty: one after the settings.
    """

    task: str
    grid: Mapping[str, Sequence[Any] | Mapping[str, Mapping[str, Any]]]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    seeds: Sequence[int] = tuple(range(SEEDS))
    lengths: Sequence[int] = ()
    name: str = ""

    def build(self) -> Sweep:
        """Return the sweep.

        Raises:
            ValueError: for an unknown task or option, or values that no run can have; the runs are
                named.
        """
        if self.task not in TASKS:
            raise ValueError(f"task={self.task!r}: is not a task. {suggest(self.task, TASKS)}")
        if not self.seeds:
            raise ValueError("seeds is empty: must hold at least one")
        hints = list_options(self.task)
        axes = {name: _read_axis(name, values, hints) for name, values in self.grid.items()}
        for name, values in self.grid.items():
            # A named set of options may leave this one as it is in all runs.
            if name in self.fixed and not isinstance(values, Mapping):
                raise ValueError(
                    f"{name}={self.fixed[name]}: is also on the grid; give it only there"
                )
        fixed = _split_layers({"precision": PRECISION, **self.fixed}, "options", hints)
        cells = combine(self.task, axes, fixed=fixed, seeds=self.seeds, lengths=self.lengths)
        identity = json.dumps([self.task, fixed, list(self.lengths)], sort_keys=True, default=str)
        digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
        name = self.name or f"{'sweep' if self.grid else f'{self.task}-seeds'}-{digest}"
        return Sweep(name, "", _find_lengths(cells))


def build_suite(
    suite: Suite,
    grid: Mapping[str, Sequence[Any] | Mapping[str, Mapping[str, Any]]],
    fixed: Mapping[str, Any],
    seeds: Sequence[int] = tuple(range(SEEDS)),
) -> Sweep:
    """Return the sweep of a published suite: its tasks that the lab has, each over the grid.

    Args:
        suite: the suite.
        grid: values by option of models and training.
        fixed: options of all runs.
        seeds: of the runs of each setting.

    Raises:
        ValueError: for an option that the suite sets, or as `SweepSettings.build`.
    """
    cells: list[Cell] = []
    for entry in suite.known:
        for name in (*grid, *fixed):
            if name in entry.options or name in {f.name for f in fields(TASKS[entry.task])}:
                raise ValueError(f"{name}: is set by the suite {suite.name}, for {entry.name}")
        options = {**entry.options, **fixed}
        built = SweepSettings(entry.task, grid, options, seeds, entry.lengths).build()
        cells += [
            replace(cell, factors={"task": entry.name, **cell.factors}) for cell in built.cells
        ]
    digest = hashlib.sha256(json.dumps(fixed, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return Sweep(f"{suite.name}-{digest}", suite.title, tuple(cells))


def list_options(task: str) -> dict[str, Any]:
    """Return the options that the runs of a sweep may have, and their types."""
    found: dict[str, Any] = {"preset": str}
    for kind in (TASKS[task], ModelConfig, TrainConfig, Runtime):
        hints = get_type_hints(kind)
        found |= {f.name: hints[f.name] for f in fields(kind) if f.init}
    return {name: hint for name, hint in found.items() if name not in OTHER_WAYS}


def _check_name(where: str, option: str, known: Mapping[str, Any]) -> None:
    if option in OTHER_WAYS:
        raise ValueError(f"{where}={option}: use {OTHER_WAYS[option]} instead")
    if "." not in option and option not in known:
        raise ValueError(f"{where}={option}: is not an option. {suggest(option, known)}")


def _read_axis(name: str, values: Any, known: Mapping[str, Any]) -> Axis:
    """Return the axis of a grid's values.

    Raises:
        ValueError: for an unknown option, no values, or a value given twice.
    """
    if name in MEASURED and name not in known:
        raise ValueError(f"grid={name}: is a column of every table; choose another name")
    if isinstance(values, Mapping):
        axis: Axis = {
            str(n): _split_layers(o, f"grid.{name}.{n}", known) for n, o in values.items()
        }
    else:
        _check_name("grid", name, known)
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise ValueError(f"grid={name}: must be a list of values, is {values!r}")
        for value in values:
            if not isinstance(value, str | int | float):
                raise ValueError(f"{name}={value!r}: must be a number, text, or true or false")
            if (name, value) == ("precision", "auto"):
                raise ValueError(ONE_PRECISION)
            if list(values).count(value) > 1:
                raise ValueError(f"{name}={value}: is given twice, must be given once")
        axis = make_axis(name, values)
    if not axis:
        raise ValueError(f"grid={name}: has no values, must have at least one")
    return axis


def _split_layers(options: Any, where: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with those of layers, such as S.d_state, as `lab TASK` takes them."""
    if not isinstance(options, Mapping):
        raise ValueError(f"{where}: must hold options, such as d_model = 64, is {options!r}")
    for option in options:
        _check_name(where, option, known)
    if options.get("precision") == "auto":
        raise ValueError(ONE_PRECISION)
    return merge(
        *(next(iter(make_axis(option, [value]).values())) for option, value in options.items())
    )


def _find_lengths(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """Return the cells, those without lengths evaluated at the row length of their task.

    Raises:
        ValueError: for options that make no run; all such cells are named.
    """
    found, errors = [], {}
    for cell in cells:
        try:
            run, _ = read_settings(cell.task, cell.options)
            for length in cell.lengths:
                run.task.resize(length)
        except ValueError as error:
            errors[cell.name] = str(error)
            continue
        found.append(
            cell
            if cell.lengths
            else Cell(cell.factors, cell.task, cell.options, (run.task.seq_len,))
        )
    refuse_cells(errors, len(cells))
    return tuple(found)


def refuse_cells(errors: Mapping[str, str], total: int) -> None:
    """Name the cells that cannot be run, if there are any, by the reason.

    Raises:
        ValueError: with a line for each reason.
    """
    if not errors:
        return
    opening = f"{len(errors)} of {total} runs cannot be built, so none is started: "
    raise ValueError(opening + list_reasons(errors))


def list_reasons(errors: Mapping[str, str]) -> str:
    """Return the errors of cells, each with the names of those that have it; several in lines."""
    reasons: dict[str, list[str]] = {}
    for name, error in errors.items():
        reasons.setdefault(error, []).append(name)
    lines = [f"{error} ({join_some(names)})" for error, names in reasons.items()]
    return lines[0] if len(lines) == 1 else "\n" + "\n".join(lines)


def join_some(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = len(names) - MOST_NAMED
    return "; ".join(names[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


def read_grid(task: str, texts: Sequence[str]) -> dict[str, list[Any]]:
    """Read ["d_model=32,64", …]: values are separated by commas; one with a comma is quoted.

    Raises:
        ValueError: for no text or one of another form, an unknown task or option, or a value of
            another type.
    """
    if task not in TASKS:
        raise ValueError(f"task={task!r}: is not a task. {suggest(task, TASKS)}")
    if not texts:
        raise ValueError(
            f"grid is empty: give at least one, such as d_model=32,64; `lab {task} --seeds N` "
            "trains runs that differ in the seed alone"
        )
    known, grid = list_options(task), {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name if "." in name else name.replace("-", "_")
        if not equals or not values:
            raise ValueError(f"grid={text}: must look like d_model=32,64")
        if name in grid:
            raise ValueError(f"grid={text}: {name} is given twice; list all its values in one")
        _check_name("grid", name, known)
        words = next(csv.reader([values], skipinitialspace=True))
        grid[name] = [_read_value(name, word, known) for word in words]
    return grid


def _read_value(name: str, text: str, known: Mapping[str, Any]) -> Any:
    if "." in name:
        return read_number(text)
    value = text if name == "preset" else read(name, text, known[name])
    return text if isinstance(value, tuple | Span) else value


def read_file(file: Path) -> SweepSettings:
    """Read a sweep from a TOML file with task, seeds, lengths, [options] and [grid].

    Raises:
        ValueError: for a file that cannot be read, or has unknown parts or values of other types.
    """
    return parse(read_toml(file), str(file), file.stem)


def parse(content: Mapping[str, Any], where: str, name: str) -> SweepSettings:
    """Return the settings that the content of a file describes.

    Raises:
        ValueError: for unknown or missing parts, or values of other types.
    """
    for part in content:
        if part not in PARTS:
            raise ValueError(f"{where}: unknown part {part!r}. {suggest(part, PARTS)}")
    if not isinstance(content.get("task"), str):
        raise ValueError(f'{where}: task must name a task, such as task = "mqar"')
    for part in ("options", "grid"):
        if not isinstance(content.get(part, {}), dict):
            raise ValueError(f"{where}: {part} must be a table, [{part}]")
    settings = SweepSettings(
        task=content["task"],
        grid=content.get("grid", {}),
        fixed=content.get("options", {}),
        seeds=read_seeds(content.get("seeds", SEEDS), where),
        lengths=_read_whole_numbers(content.get("lengths", []), f"{where}: lengths", 1),
        name=name,
    )
    if not settings.grid:
        raise ValueError(f"{where}: grid is empty; it must have at least one option")
    return settings


def read_seeds(seeds: Any, where: str = "") -> tuple[int, ...]:
    """Return the seeds that a number of them, or a list, stands for.

    Raises:
        ValueError: for another type, or a number out of its bounds.
    """
    name = f"{where}: seeds" if where else "seeds"
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        if not 1 <= seeds <= MOST_SEEDS:
            raise ValueError(f"{name}={seeds}: must be in 1 … {MOST_SEEDS:,}")
        return tuple(range(seeds))
    if not isinstance(seeds, list | tuple):
        raise ValueError(f"{name}={seeds!r}: must be how many, or a list of whole numbers")
    return _read_whole_numbers(seeds, name, 0)


def _read_whole_numbers(values: Any, name: str, least: int) -> tuple[int, ...]:
    if not isinstance(values, list | tuple):
        raise ValueError(f"{name}={values!r}: must be a list of whole numbers")
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}={value!r}: must be a whole number ≥ {least}")
    if len(set(values)) < len(values):
        raise ValueError(f"{name}: must name each once")
    return tuple(values)


def parse_lengths(text: str | None) -> tuple[int, ...]:
    """Read row lengths, "64,128"; None stands for that of the task.

    Raises:
        ValueError: for text that is not a list of whole numbers above 0.
    """
    if text is None:
        return ()
    values = [read_number(word) for word in text.split(",")]
    return _read_whole_numbers(values, "lengths", 1)

"""A sweep: cells, each with the options of one run; the cells of a grid."""

import contextlib
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tasks.near_names import list_choices

Factor = str | int | float
Axis = Mapping[Factor, Mapping[str, Any]]
"""The values of an axis, and the options that each stands for: `{32: {"d_model": 32}}`."""
LONGEST_NAME = 200
"""Maximum number of bytes of a folder's name; most systems have room for 255."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
        factors: the values that distinguish it from other cells, by column of the table.
        task: the task's name.
        options: the options of `lab TASK`, by field name:
            `{"seq_len": 64, "options": ["A.mask=soft"]}`.
        lengths: row lengths at which it is evaluated; the table has a row for each.
    """

    factors: Mapping[str, Factor]
    task: str
    options: Mapping[str, Any]
    lengths: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of its folder; the end of a long one is a digest of it."""
        text = ",".join(f"{factor}={value}" for factor, value in self.factors.items())
        name = re.sub(r"[^\w=,.+-]+", "_", text)
        if len(name.encode()) <= LONGEST_NAME:
            return name
        digest = hashlib.sha256(name.encode()).hexdigest()[:12]
        return f"{name.encode()[: LONGEST_NAME - 13].decode(errors='ignore')}-{digest}"


@dataclass(frozen=True)
class Sweep:
    """Cells in the order in which they are run, the most informative first.

    Attributes:
        name: of the sweep.
        question: the question that it answers; empty where the user alone knows.
        cells: with the same factors, and no two alike.

    Raises:
        ValueError: for cells whose factors have different names, or that would share a folder.
    """

    name: str
    question: str
    cells: tuple[Cell, ...]

    def __post_init__(self):
        if not self.cells:
            raise ValueError(f"{self.name}: has no cells")
        for cell in self.cells:
            if tuple(cell.factors) != self.factors:
                raise ValueError(
                    f"{cell.name}: has the factors {', '.join(cell.factors)}, must have "
                    f"{', '.join(self.factors)}"
                )
        name, times = Counter(cell.name for cell in self.cells).most_common(1)[0]
        if times > 1:
            raise ValueError(f"{name}: names {times} cells, must name one")

    @property
    def factors(self) -> tuple[str, ...]:
        """The names of the factors, in order."""
        return tuple(self.cells[0].factors)

    def select(self, chosen: Sequence[str]) -> "Sweep":
        """Return the sweep of the cells that have the given values, each "factor=value".

        A cell must have one of the values given for each factor that is named.

        Raises:
            ValueError: for text of another form, an unknown factor, or one that no cell has.
        """
        wanted: dict[str, set[str]] = {}
        known = {
            factor: list(dict.fromkeys(str(cell.factors[factor]) for cell in self.cells))
            for factor in self.factors
        }
        for text in chosen:
            factor, equals, value = text.partition("=")
            if not equals or factor not in known:
                raise ValueError(
                    f"only={text}: must be FACTOR=VALUE; FACTOR {list_choices(factor, known)}"
                )
            if value not in known[factor]:
                values = list_choices(value, known[factor])
                raise ValueError(f"only={text}: {factor} {values}")
            wanted.setdefault(factor, set()).add(value)
        cells = tuple(
            cell
            for cell in self.cells
            if all(str(cell.factors[factor]) in values for factor, values in wanted.items())
        )
        if not cells:
            raise ValueError(f"only={', '.join(chosen)}: no cell has all of these")
        return Sweep(self.name, self.question, cells)


def make_axis(option: str, values: Sequence[Factor]) -> Axis:
    """Return the axis of one option, such as d_model, or S.d_state of a layer."""
    if "." in option:
        return {value: {"options": [f"{option}={value}"]} for value in values}
    return {value: {option: value} for value in values}


def combine(
    task: str,
    axes: Mapping[str, Axis],
    *,
    fixed: Mapping[str, Any],
    seeds: Sequence[int],
    lengths: Sequence[int] = (),
) -> tuple[Cell, ...]:
    """Return a cell for each combination: all with the first seed, then all with the next.

    The values of the last axis change fastest.

    Args:
        task: the task's name.
        axes: by the name of the factor.
        fixed: options of all cells; those of an axis take precedence.
        seeds: of the runs.
        lengths: row lengths at which each run is evaluated.
    """
    return tuple(
        Cell(
            {**dict(zip(axes, labels, strict=True)), "seed": seed},
            task,
            merge(fixed, *(axes[name][label] for name, label in zip(axes, labels, strict=True)))
            | {"seed": seed},
            tuple(lengths),
        )
        for seed in seeds
        for labels in product(*axes.values())
    )


def merge(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Merge options; where two parts have the same, the later one counts.

    Options of layers, a list of "S.d_state=64", are merged one by one.
    """
    merged: dict[str, Any] = {}
    layers: dict[str, str] = {}
    for part in parts:
        merged |= part
        for text in part.get("options", ()):
            layers[text.partition("=")[0]] = text
    return {**merged, "options": list(layers.values())} if layers else merged


def read_number(text: str) -> Factor:
    """Return a whole number, a number, or else the text."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text

"""The cells of a grid: every combination of the values of its axes, with every seed."""

import contextlib
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from lab.sweeps.sweep import Cell, Factor

Axis = Mapping[Factor, Mapping[str, Any]]
"""The values of an axis, and the options that each stands for: `{32: {"d_model": 32}}`."""


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

"""Counting the parameters of the settings that a claim compares at equal size."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from analysis.claims.claim import Statistic
    from lab.sweeps import Cell, Sweep


def check_parameters(
    equal: Mapping[str, float], statistic: "Statistic", sweep: "Sweep"
) -> list[str]:
    """Return the parameters of the settings at each place, in words; none if they may differ.

    A place is a combination of values of the factors that the statistic does not compare. The
    settings are all values of those that it does compare, including values that it does not name.

    Args:
        equal: by how large a share of the least they may differ, for total and active parameters.
        statistic: of the claim.
        sweep: of the claim at a scale.

    Raises:
        ValueError: for settings that differ by more; their numbers are in the message.
    """
    if not equal:
        return []
    from analysis.sweeps.settings import RATE, name_values

    compared = {*statistic.of, *statistic.than}
    counts: dict[str, dict[str, dict[str, int]]] = {}
    models: dict[str, dict[str, int]] = {}
    for cell in sweep.cells:
        if cell.factors["seed"] != sweep.cells[0].factors["seed"]:
            continue
        place = {n: v for n, v in cell.factors.items() if n not in {*compared, RATE, "seed"}}
        setting = name_values({n: v for n, v in cell.factors.items() if n in compared})
        found = counts.setdefault(name_values(place) if place else "", {})
        if setting not in found:  # the learning rate changes nothing
            found[setting] = _count(cell, models)
    return [
        _compare(kind, share, {name: found[kind] for name, found in settings.items()}, place)
        for place, settings in counts.items()
        for kind, share in equal.items()
    ]


def _count(cell: "Cell", models: dict[str, dict[str, int]]) -> dict[str, int]:
    """Return the parameters of a cell's model; `models` keeps them, as many cells have the same."""
    import torch

    from lab.cli.run_settings import read_settings
    from lab.models.anatomy import dissect

    run, _ = read_settings(cell.task, cell.options)
    model = f"{run.model}, {run.task.vocab_size} tokens"
    if model not in models:
        with torch.device("meta"):  # no weights are drawn
            found = dissect(run.build())
        models[model] = {"total": found.total, "active": found.active}
    return models[model]


def _compare(kind: str, share: float, counts: Mapping[str, int], place: str) -> str:
    least, most = min(counts.values()), max(counts.values())
    numbers = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    line = f"{kind} parameters{f' at {place}' if place else ''}: {numbers}"
    if most - least > share * least:
        raise ValueError(
            f"equal.{kind}={share:g}: the settings differ by {(most - least) / least:.2%}: {line}"
        )
    return line

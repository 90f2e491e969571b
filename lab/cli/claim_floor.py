"""The accuracy that needs no learning, where the settings of a claim are compared."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from analysis.claims.claim import Statistic
    from analysis.claims.verdict import Floor
    from lab.sweeps import Sweep
    from tasks.base import Task

ROWS = 64
"""Rows on which shortcuts are scored."""


def measure_floor(statistic: "Statistic", sweep: "Sweep") -> "Floor":
    """Return chance and the best shortcut, averaged over the settings that a difference compares
    and their row lengths; zeros where there is none, or for a statistic that they do not decide.
    """
    from analysis.claims.verdict import Floor
    from lab.cli.run_settings import read_settings

    if statistic.kind != "difference":
        return Floor()
    known: dict[str, dict[str, float]] = {}
    found = []
    settings = [{**setting, **statistic.at} for setting in (statistic.of, statistic.than)]
    for cell in sweep.cells:
        task = read_settings(cell.task, cell.options)[0].task
        for length in cell.lengths:
            named = {**cell.factors, "seq_len": length}
            if any(setting.items() <= named.items() for setting in settings):
                at = task if length == task.seq_len else task.resize(length)
                known[repr(at)] = known.get(repr(at)) or _score(at)
                found.append(known[repr(at)])
    if not found:
        return Floor()
    means = {name: sum(scores[name] for scores in found) / len(found) for name in found[0]}
    chance = means.pop("chance")
    name = max(means, key=means.__getitem__, default="")
    return Floor(chance, name, means.get(name, chance))


def _score(task: "Task") -> dict[str, float]:
    """Return the accuracy of chance and of each shortcut."""
    from lab.suite.audit import audit

    scores = audit(task, rows=ROWS).scores
    return {score.name: score.accuracy for score in scores if score.name != "oracle"}

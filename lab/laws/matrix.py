"""The law of the matrix: the matrix that a mixer returns is the one it applies."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lab.laws.comparison import run_trials
from lab.laws.law import Law
from lab.laws.probes import Probes
from lab.laws.trial import Trial
from lab.laws.verdict import Verdict
from lab.layers.mixer import MatrixMixer


def judge(module: nn.Module, probes: Probes) -> Verdict:
    """forward(x) = project(x, matrix(x) @ values(x))."""
    if not isinstance(module, MatrixMixer):
        missing = "the module has no matrix, values and project"
        return Verdict(LAW.name, "not applicable", missing)
    return run_trials(LAW.name, module, probes, _list_trials)


LAW = Law("matrix applies", judge, conditions="evaluating", seeded=False)


def _list_trials(module: nn.Module, x: Tensor) -> Iterator[Trial]:
    words = "forward(x) is not project(x, matrix(x) @ values(x)) at output {position} of row {row}"
    yield Trial(compare_matrix, {}, words)


@torch.no_grad()
def compare_matrix(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return how outputs move when the returned matrix is applied."""
    y = module(x)
    return module.project(x, module.matrix(x) @ module.values(x)) - y, y

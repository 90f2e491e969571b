"""The law of batches: a row's output depends on that row only."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lab.laws.comparison import Trial, run_trials
from lab.laws.law import Law
from lab.laws.probes import Probes, draw
from lab.laws.verdict import Verdict

MOST_ROWS = 32


def judge(module: nn.Module, probes: Probes) -> Verdict:
    """A row gives the same output alone, beside other rows, and in another order."""

    def trials(module: nn.Module, x: Tensor) -> Iterator[Trial]:
        yield from _list_trials(x, probes.same_shape)

    # Calls with inputs of the same shape round alike.
    inside = probes.dtype if probes.same_shape else None
    return run_trials(LAW.name, module, probes, trials, inside=inside)


LAW = Law("batch-invariant", judge, conditions="all")


def _list_trials(x: Tensor, same_shape: bool) -> Iterator[Trial]:
    if not same_shape:
        words = "reversing the batch moves output {position} of row {row}"
        yield Trial(compare_reversed_rows, {}, words)
        if x.shape[1] <= MOST_ROWS:
            # With as many rows as tokens, axes that are mistaken for each other fit.
            words = "with as many rows as tokens, output {position} of row {row} moves"
            yield Trial(compare_square_batch, {}, words, refusable=True)
    for row in range(x.shape[0]):
        if not same_shape:
            words = f"without the other rows, output {{position}} of row {row} moves"
            yield Trial(compare_row_alone, {"row": row}, words, refusable=True)
        words = f"beside other rows, output {{position}} of row {row} moves"
        yield Trial(compare_among_others, {"row": row}, words)


@torch.no_grad()
def compare_reversed_rows(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return how outputs move when the rows come in reverse order."""
    y = module(x)
    return module(x.flip(0)).flip(0) - y, y


@torch.no_grad()
def compare_row_alone(module: nn.Module, x: Tensor, row: int) -> tuple[Tensor, Tensor]:
    """Return how a row's output moves when the row is alone."""
    y = module(x)
    return module(x[row : row + 1]) - y[row : row + 1], y


@torch.no_grad()
def compare_among_others(module: nn.Module, x: Tensor, row: int) -> tuple[Tensor, Tensor]:
    """Return how a row's output moves when all other rows change."""
    y = module(x)
    others = 8 * draw(x.shape, seed=row + 1).to(x)
    others[row] = x[row]
    return (module(others) - y)[row : row + 1], y


@torch.no_grad()
def compare_square_batch(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return how outputs move when there are as many rows as tokens."""
    y = module(x)
    rows = draw((x.shape[1], *x.shape[1:]), seed=1).to(x)
    n = min(len(rows), len(x))
    rows[:n] = x[:n]
    return module(rows)[:n] - y[:n], y

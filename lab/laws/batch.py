"""The law of batches: a row's output depends on that row only."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from lab.laws.comparison import run_trials
from lab.laws.law import Law
from lab.laws.probes import Probes, draw
from lab.laws.special import compare_beside_special, list_special, name_special
from lab.laws.trial import Trial
from lab.laws.verdict import Verdict

MOST_ROWS = 32
MANY_ROWS = (32, 65, 130, 520)
"""Batches of short rows: sizes that exceed blocks of rows."""
NEAR = 0.01
"""Distance of similar tokens, which are routed alike, so that experts overflow."""


def judge(module: nn.Module, probes: Probes) -> Verdict:
    """A row gives the same output alone, beside other rows, and in another order."""

    short = min((n for n in probes.lengths if n > 1), default=probes.lengths[0])

    def trials(module: nn.Module, x: Tensor) -> Iterator[Trial]:
        yield from _list_trials(x, probes.same_shape)
        if x.shape[1] == short and not probes.same_shape:
            yield from _list_many_rows(probes.most_rows)
        for special in list_special(module) if x.shape[1] == short and len(x) > 1 else ():
            s = x.shape[1] // 2
            words = f"beside rows that end in {name_special(special)} from position {s} on, output "
            given = {"s": s, "special": special}
            yield Trial(compare_beside_special, given, f"{words}{{position}} of row 0 moves")

    # Calls with inputs of the same shape round alike.
    inside = probes.dtype if probes.same_shape else None
    found = run_trials(LAW.name, module, probes, trials, inside=inside)
    if found.verdict != "holds" or probes.same_shape:
        return found
    rows = max(n for n in MANY_ROWS if n <= probes.most_rows)
    return replace(found, evidence=f"{found.evidence}; up to {rows} rows of {short} tokens")


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


def _list_many_rows(most: int) -> Iterator[Trial]:
    for rows in (n for n in MANY_ROWS if n <= most):
        words = f"in a batch of {rows}, output {{position}} of a row moves"
        yield Trial(compare_many_rows, {"rows": rows, "spread": 1.0}, words, refusable=True)
    rows = max(n for n in MANY_ROWS if n <= most)
    words = f"in a batch of {rows} similar rows, output {{position}} of a row moves"
    yield Trial(compare_many_rows, {"rows": rows, "spread": NEAR}, words, refusable=True)


@torch.no_grad()
def compare_many_rows(
    module: nn.Module, x: Tensor, rows: int, spread: float
) -> tuple[Tensor, Tensor]:
    """Return how the first, middle and last outputs of a large batch move in a batch of three.

    A spread below 1 is the distance of all tokens from the first token of x.
    """
    many = spread * draw((rows, *x.shape[1:]), seed=rows).to(x)
    if spread < 1:
        many += x[0, 0]
    y = module(many)
    few = [0, rows // 2, rows - 1]
    return module(many[few]) - y[few], y


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

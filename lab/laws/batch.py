"""The law of batches: a row's output is its own."""

import torch
from torch import Tensor, nn

from lab.laws.probes import Probes, draw, relative
from lab.laws.verdict import Errors, Verdict, compared


def batch_invariant(module: nn.Module, probes: Probes) -> Verdict:
    """A row gives the same output alone, beside other rows, and in another order."""
    return compared("batch-invariant", module, probes, _errors)


def _errors(module: nn.Module, x: Tensor) -> Errors:
    with torch.no_grad():
        y = module(x)
        reversed_y = module(x.flip(0)).flip(0)
        yield relative(reversed_y - y, y), "reversing the batch moves a row's output"
        for row in range(x.shape[0]):
            one = slice(row, row + 1)
            alone = module(x[one])
            yield relative(alone - y[one], y), f"row {row} alone gives another output"
            others = 8 * draw(x.shape, seed=row + 1).to(x)
            others[one] = x[one]
            beside = module(others)[one]
            yield relative(beside - y[one], y), f"row {row} beside others gives another output"

"""How much memory an audit's predictors take: measured on few rows, refused where it is not free.

    rows, and the larger of
        what predictors make of them, in proportion to the rows
        tables of frequent answers, which some count on training rows when they first answer

Some predictors go over lists of numbers, so Python's own objects are measured, too.
"""

import math
from functools import partial

from lab.machine.allocation import measure_whole_peak
from lab.machine.growth import TOKENS, Demand, Growth, check_demand, measure_growth
from lab.suite.audit import ROWS, TOKENS_AT_ONCE, count_audited, list_predictors
from tasks.base import Batch, Task, count_rows

ROW = 24
"""Bytes of a token in a batch: its input, its target and its role."""
FRAGMENTS = 1.45
"""Bytes a process takes for each byte that answers are made of: pieces of many sizes leave more
gaps than those of a model, 1.0 to 2.0 in 13 audits (LOG.md)."""


def estimate_audit(
    task: Task, rows: int = ROWS, tokens: int = TOKENS, limit: float = math.inf
) -> Demand:
    """Estimate what scoring predictors on some rows takes.

    Raises:
        OverLimitError: when the tensors of a few rows take more than the limit.
    """
    predictors = list_predictors(task)

    def predict(batch: Batch) -> None:
        for answer in predictors.values():
            answer(batch)

    tables = measure_whole_peak(lambda: predict(task.batch(split="test", size=1)), limit)
    at_once = count_rows(TOKENS_AT_ONCE, task.seq_len, most=count_audited(task, rows))
    answers = measure_growth(
        task, at_once, predict, tokens=tokens, limit=limit, whole=True, measure=measure_whole_peak
    )
    counting = Growth(tables, ROW, 0.0, task.seq_len)
    demands = Demand(0, at_once, answers, FRAGMENTS), Demand(0, at_once, counting)
    return max(demands, key=lambda demand: demand.total)


def check_audit(task: Task, rows: int = ROWS, free: int | None = None) -> None:
    """Check that memory holds an audit of the predictors.

    Args:
        task: the task.
        rows: as for `lab.suite.audit.audit`.
        free: bytes that may be taken; None: what is free.

    Raises:
        DoesNotFitError: naming the row length, the bytes, and the longest row that fits.
    """
    check_demand("an audit", task, partial(estimate_audit, task, rows), free)

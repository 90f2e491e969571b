"""How much memory the ladder takes: each of its models, and an evaluation of it."""

import math
from dataclasses import replace
from functools import partial

from lab.config import ModelConfig
from lab.constructions.ladder import BLOCKS, TOKENS_AT_ONCE, list_steps
from lab.constructions.solve import BUILT
from lab.layers.mask import has_oracle_mask
from lab.machine.growth import MANY_TOKENS, TOKENS, Demand, check_demand
from lab.machine.memory import DoesNotFitError, measure_free_memory
from lab.models import build
from lab.models.memory import FLOAT, estimate_evaluation, refuse_weights
from tasks.base import Task, count_rows

NUMBERS_A_TOKEN = 200
"""More than the numbers that a model makes of a token, as a multiple of its width."""
NUMBERS_A_BLOCK = 24
"""More than the weights of a block, as a multiple of the square of the width."""
LONG = 2**14
"""Tokens of a row from which on a mask may take more for a token than these."""


def estimate_ladder(
    task: Task, d_model: int, n_heads: int, tokens: int = MANY_TOKENS, limit: float = math.inf
) -> Demand:
    """Estimate what the model takes that takes most, with an evaluation of it.

    Long rows are not tried on a mask that is told where pairs are, as rows cannot be cut for it.

    Raises:
        DoesNotFitError: for models whose weights memory does not hold.
        OverLimitError: when a measured pass takes more than the limit.
    """
    at_once = count_rows(TOKENS_AT_ONCE, task.seq_len)
    demands = []
    for _, stack, options in list_steps("M"):
        config = ModelConfig(stack=stack, d_model=d_model, n_heads=n_heads, options=dict(options))
        try:
            with refuse_weights(config, task.vocab_size):
                model = build(**config.to_dict(), vocab_size=task.vocab_size).eval()
            if task.seq_len > 2 * TOKENS and has_oracle_mask(model):
                continue
            found = estimate_evaluation(task, model, at_once, tokens, limit)
        except DoesNotFitError:
            raise
        except ValueError:  # as in the ladder, there is no such model
            continue
        demands.append(replace(found, fixed=sum(p.nbytes for p in model.parameters())))
    return max(demands, key=lambda demand: demand.total)


def check_ladder(task: Task, d_model: int, n_heads: int, free: int | None = None) -> None:
    """Check that memory holds each model of the ladder and its evaluation.

    Models are measured only where a generous bound leaves a doubt, since building them takes long.

    Args:
        task: the task.
        d_model: width of the models.
        n_heads: heads of their mixers.
        free: bytes that may be taken; None: what is free.

    Raises:
        DoesNotFitError: naming the sizes, the bytes, and the longest row that fits.
    """
    bound = measure_free_memory() if free is None else free
    tokens = count_rows(TOKENS_AT_ONCE, task.seq_len) * task.seq_len
    block = NUMBERS_A_BLOCK * d_model
    numbers = d_model * (task.vocab_size + BLOCKS * block + NUMBERS_A_TOKEN * tokens)
    if task.name in BUILT and (FLOAT * numbers > bound or task.seq_len >= LONG):
        estimate = partial(estimate_ladder, task, d_model, n_heads)
        check_demand("a model with weights set by hand", task, estimate, bound)

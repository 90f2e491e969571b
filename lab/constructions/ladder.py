"""The ladder: every mixer with every mask, and whether its construction solves the task."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lab.config import ModelConfig
from lab.constructions.cannot import CannotError
from lab.constructions.solve import BUILT, check_known, set_by_hand
from lab.layers.attention import Mask
from lab.layers.ssd import Position
from lab.machine import DoesNotFitError, explain_lack_of_memory
from lab.models import CLASSES, TRANSFORMS, build
from lab.models.evaluation import evaluate
from lab.models.stack import parse_stack
from tasks.base import Task, count_rows

Outcome = Literal["solves", "cannot", "not built", "no such model"]
NAMES = {"A": "attention", "I": "inner function attention"}
BLOCKS = 2
TOKENS_AT_ONCE = 4096
SOLVED = 0.99
"""Accuracy that counts as solved, as for a run; below 1 because SSD, reading a sum, misses some."""


@dataclass(frozen=True)
class Rung:
    """One mixer, with what its construction reaches.

    Attributes:
        mixer: in words.
        stack: in letters.
        options: of the layers, by letter.
        outcome: "cannot" holds for all weights, "not built" for this construction; "no such model"
            where the options allow none.
        accuracy: on the test rows; None where no weights were set.
        because: one clause: the bound, why nothing is built, or how many rows the accuracy is of.
    """

    mixer: str
    stack: str
    options: Mapping[str, Any]
    outcome: Outcome
    accuracy: float | None
    because: str


def ladder(
    task: Task,
    *,
    d_model: int = 64,
    n_heads: int = 1,
    transform: str = "M",
    test_rows: int = 64,
    seed: int = 0,
) -> list[Rung]:
    """Return a rung for each mixer and mask or position, in a fixed order.

    Args:
        task: any; for a task that has no constructions the ladder is empty.
        d_model: width of the models.
        n_heads: heads of their mixers.
        transform: letter of their state transforms.
        test_rows: rows of the test split that each is evaluated on.
        seed: of the rows, and of weights that are not set.

    Raises:
        ValueError: for sizes that do not divide, or an unknown letter; or DoesNotFitError for
            models that memory does not hold.
    """
    parse_stack(f"A{transform}", CLASSES, TRANSFORMS)
    if task.name not in BUILT:
        return []
    rungs = []
    for mixer, stack, options in list_steps(transform):
        config = ModelConfig(stack=stack, d_model=d_model, n_heads=n_heads, options=dict(options))
        rungs.append(rung(task, config, mixer=mixer, test_rows=test_rows, seed=seed))
    return rungs


def list_steps(transform: str) -> list[tuple[str, str, dict[str, str]]]:
    """Return (mixer in words, stack, options) of every rung."""
    steps = []
    for letter, name in NAMES.items():
        for mask in get_args(Mask):
            words = f"{name}, no mask" if mask == "none" else f"{name} + {mask} mask"
            steps.append((words, f"{letter}{transform}*{BLOCKS}", {f"{letter}.mask": mask}))
    for position in get_args(Position):
        options = {"S.position": position}
        steps.append((f"SSD, position {position}", f"S{transform}*{BLOCKS}", options))
    return steps


def rung(
    task: Task, config: ModelConfig, *, mixer: str, test_rows: int = 64, seed: int = 0
) -> Rung:
    """Return what the construction of one configuration reaches.

    Args:
        task: one of `BUILT`.
        config: of the model.
        mixer: what to call it.
        test_rows: rows of the test split to evaluate on.
        seed: of the rows, and of weights that are not set.

    Raises:
        ValueError: for a task of another name.
    """
    check_known(task)
    outcome, accuracy, because = _climb(task, config, test_rows, seed)
    return Rung(mixer, config.stack, config.options, outcome, accuracy, because)


def _climb(
    task: Task, config: ModelConfig, test_rows: int, seed: int
) -> tuple[Outcome, float | None, str]:
    try:
        with explain_lack_of_memory(f"d_model={config.d_model}, vocab_size={task.vocab_size}"):
            model = build(**config.to_dict(), vocab_size=task.vocab_size, seed=seed)
    except DoesNotFitError:
        raise
    except ValueError as refusal:  # a head of odd width cannot be rotated, say
        return "no such model", None, str(refusal)
    try:
        set_by_hand(model, task)
    except CannotError as refusal:
        return refusal.outcome, None, refusal.reason
    at_once = count_rows(TOKENS_AT_ONCE, task.seq_len)
    try:
        reached = evaluate(task, model, rows=test_rows, rows_at_once=at_once, seed=seed)
    except ValueError as refusal:  # a mask's table of positions may be shorter than a row
        return "no such model", None, str(refusal)
    if reached.accuracy >= SOLVED:
        share = (
            "every answer"
            if reached.accuracy == 1
            else f"{100 * reached.accuracy:.2f} % of the answers"
        )
        because = f"{share} of {test_rows} rows, at a loss of {reached.loss:.2g}"
        return "solves", reached.accuracy, because
    because = f"the weights set by hand miss answers, at a loss of {reached.loss:.2g}"
    return "not built", reached.accuracy, because

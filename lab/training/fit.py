"""The training loop: `fit` yields one `Row` a step and touches no disk."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lab.config import TrainConfig
from lab.training.row import Row
from lab.training.state import TrainingState
from lab.training.stepper import Stepper
from tasks.base import Task

if TYPE_CHECKING:
    from lab.training.parallel import Leader


def fit(
    task: Task,
    state: TrainingState,
    config: TrainConfig,
    precision: str,
    on_note: Callable[[str], None] = lambda text: None,
    leader: "Leader | None" = None,
) -> Iterator[Row]:
    """Train to the end, yielding one `Row` a step; then `state` is complete and can be saved.

    A stage ends when its rows are learned; the next one has longer rows (`lab.lengthening`).
    Training ends after the last step, or when a shorter stage is not learned in its own limit of
    steps and `TrainConfig.unlearned` does not let rows lengthen all the same.

    Rows of the task are numbered in the order of training, so a state alone tells the next row.

    Args:
        task: where rows come from.
        state: changed in place.
        config: how to train.
        precision: "fp32" or "bf16" (autocast of the forward pass; weights stay fp32).
        on_note: called with what is done now, before what takes longer than a step.
        leader: of other processes that compute shares of the gradients; None: there are none.

    Raises:
        ValueError: as `check`.
        DivergedError: before taking a step that would make weights non-finite.
        LostProcessError: when another process has ended.
    """
    stepper = Stepper(task, state, config, on_note, leader)
    while (row := stepper.take_step(precision)) is not None:
        yield row

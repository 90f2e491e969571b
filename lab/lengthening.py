"""Lengthening: training starts with short rows and goes on to longer ones, up to those asked for.

On rows of 2,048 tokens, the paper's hardest recall, the loss stays on a plateau for hours. On rows
of 16 tokens the same model leaves it in minutes, and what it learns there carries over: each
longer row takes a few dozen steps (LOG.md has the measurements).
"""

from dataclasses import dataclass
from math import isqrt

from lab.config import TrainConfig
from tasks.base import Task


@dataclass(frozen=True)
class Stage:
    """A part of training at one row length.

    Attributes:
        task: what is trained on.
        batch_size: rows a step, such that every stage has the same tokens a step, rounded down.
        max_steps: maximum number of steps; `TrainConfig.unlearned` says what follows if the stage
            is not learned by then.
    """

    task: Task
    batch_size: int
    max_steps: int


def list_stages(task: Task, config: TrainConfig) -> tuple[Stage, ...]:
    """Return the stages of training, shortest rows first; the last is the task itself.

    The rows of each stage are twice as long as those before, but never longer than the task's.

    Raises:
        ValueError: for a start length that does not divide the row length, that the task has no
            rows of, or that is given for a task that does not grow; for a threshold that chance
            reaches; or for a training set that is not a multiple of the rows a step.
    """
    lengths = _list_lengths(task, config)
    parts = [task.resize(length) for length in lengths[:-1]]
    if parts:
        _check_threshold(parts[0], config)
    shorter = [
        Stage(part, config.batch_size * task.seq_len // part.seq_len, config.stage_steps)
        for part in parts
    ]
    for stage in shorter:
        _check_rounds(stage, config)
    return (*shorter, Stage(task, config.batch_size, config.max_steps))


def ends_stage(stage: Stage, config: TrainConfig, steps: int, accuracy: float) -> bool:
    """Return whether longer rows follow an evaluation, if there are any.

    Args:
        stage: the current one.
        config: how to train.
        steps: taken in the stage.
        accuracy: on validation rows, in [0, 1].
    """
    given_up = config.unlearned == "lengthen" and steps == stage.max_steps
    return given_up or accuracy >= config.lengthen_at


def explain_start_length(task: Task, config: TrainConfig) -> str:
    """Return why the first rows of a run that lengthens them are not half as long.

    The text is empty if they have about `shortest_len` tokens, or the length that the user gave.
    """
    first = _list_lengths(task, config)[0]
    if not config.lengthen or config.start_len is not None or first < 2 * config.shortest_len:
        return ""
    if config.init != "random":
        return f"init={config.init}"
    if first % 2:
        return f"{first} tokens have no half"
    try:
        task.resize(first // 2)
    except ValueError as error:
        return str(error)
    return ""


def _list_lengths(task: Task, config: TrainConfig) -> list[int]:
    """Return the row lengths of the stages, in order."""
    full, first = task.seq_len, config.start_len
    if first is None:
        grows = config.lengthen and config.init == "random"
        first = _find_default_start(task, config.shortest_len) if grows else full
    elif not config.lengthen:
        raise ValueError(f"start_len={first}: needs --lengthen, which is off")
    elif first > full or full % first:
        raise ValueError(
            f"start_len={first}: must divide seq_len={full}, as {_name_near(first, full)}"
        )
    lengths = []
    while first < full:
        lengths.append(first)
        first *= 2
    for length in lengths:
        try:
            task.resize(length)
        except ValueError as error:
            raise ValueError(f"start_len={config.start_len}: {error}") from error
    return [*lengths, full]


def _name_near(length: int, full: int) -> str:
    """Name the divisors of a row length that are next to another length."""
    small = [n for n in range(1, isqrt(full) + 1) if full % n == 0]
    divisors = {*small, *(full // n for n in small)}
    near = [max(n for n in divisors if n < length)]
    near += sorted(n for n in divisors if n > length)[:1]
    return f"{' and '.join(map(str, near))} {'do' if len(near) > 1 else 'does'}"


def _find_default_start(task: Task, shortest: int) -> int:
    """Halve the row length as long as it is at least `shortest` and the task has such rows."""
    length = task.seq_len
    while length % 2 == 0 and length // 2 >= shortest:
        try:
            task.resize(length // 2)
        except ValueError:
            break
        length //= 2
    return length


def _check_threshold(task: Task, config: TrainConfig) -> None:
    chance = task.chance
    if not chance < config.lengthen_at <= 1:
        raise ValueError(
            f"lengthen_at={config.lengthen_at}: must be in ({chance:.3g}, 1], above chance at "
            f"seq_len={task.seq_len}"
        )


def _check_rounds(stage: Stage, config: TrainConfig) -> None:
    if config.train_rows is not None and config.train_rows % stage.batch_size:
        raise ValueError(
            f"train_rows={config.train_rows}: must be a multiple of the {stage.batch_size} rows "
            f"a step at seq_len={stage.task.seq_len}, or use --no-lengthen"
        )

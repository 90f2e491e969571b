"""How many pairs can it hold? One model is trained at each number of stored pairs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from analysis.base import Finding, Table
from analysis.figures import Axis, Curves, Line, curves
from analysis.links import has_pairs
from analysis.words import count_interval_decimals, percent
from lab.config import TrainConfig, get_protocol_defaults
from lab.models import LanguageModel
from lab.models.evaluation import check_sizes, evaluate
from lab.training.loop import fit, start
from tasks.base import Task

__all__ = ["Capacity", "measure_capacity"]


@dataclass(frozen=True)
class Capacity(Finding):
    """Accuracy by the number of pairs that a row stores, each measured on a model of its own.

    Attributes:
        pairs: K, ascending.
        solved_at: accuracy at which training ended early.
    """

    pairs: Int[np.ndarray, " n"]
    accuracy: Float[np.ndarray, " n"]
    interval: Float[np.ndarray, "n 2"]
    chance: Float[np.ndarray, " n"]
    steps: Int[np.ndarray, " n"]
    solved_at: float

    title = "Accuracy by the number of stored pairs"
    reading = (
        "Each dot is a model trained from the same start on rows with this many pairs; whiskers "
        "are 95 % intervals over test rows, the grey line is a uniform guess. One seed each: more "
        "steps may lift a dot."
    )

    @property
    def says(self) -> str:
        """Up to how many pairs all were learned."""
        learned = np.logical_and.accumulate(self.accuracy >= self.solved_at)
        goal = self._format(self.solved_at)
        if not learned.any():
            return f"Not learned to {goal} even at K = {self.pairs[0]:,}."
        return f"Learned to {goal} up to K = {self.pairs[learned][-1]:,}, of {len(learned)} tried."

    def _format(self, share: float) -> str:
        """Format an accuracy so that one just below the goal can be told from it."""
        return percent(
            share, max(count_interval_decimals(float(a), self.solved_at) for a in self.accuracy)
        )

    def numbers(self) -> Table:
        """Return the accuracy at each number of pairs, and the steps that it took."""
        found = zip(self.pairs, self.accuracy, self.steps, strict=True)
        rows = tuple((f"{k:,}", self._format(float(a)), f"{steps:,}") for k, a, steps in found)
        return Table(("stored pairs", "accuracy", "steps"), rows)

    def figure(self) -> go.Figure:
        """Draw accuracy against the number of pairs."""
        notes = [f"{steps:,} steps" for steps in self.steps]
        lines = [
            Line("accuracy", self.pairs, self.accuracy, self.interval, notes=notes),
            Line("chance", self.pairs, self.chance, look=-1),
        ]
        ends = self.pairs[0] / 1.15, self.pairs[-1] * 1.15
        ticks = {float(k): f"{k:,}" for k in self.pairs}
        x = Axis("stored pairs K", "count", "log", ends, ticks)
        return curves([Curves(lines, Axis("accuracy", "share"))], x)


def measure_capacity(
    make_model: Callable[[], LanguageModel],
    tasks: Sequence[Task],
    config: TrainConfig | None = None,
) -> Capacity:
    """Train a new model on each task and measure what it recalls: the capacity curve.

    >>> from lab.models import build
    >>> from tasks import TASKS
    >>> tasks = [TASKS["mqar"](seq_len=16, n_pairs=k, vocab_size=32) for k in (2, 4)]
    >>> short = TrainConfig(max_steps=2, batch_size=8, test_rows=8)
    >>> measure_capacity(lambda: build("AN*2", vocab_size=32, d_model=16), tasks, short).pairs
    array([2, 4])

    Args:
        make_model: returns the model to train, every time from the same weights: an opened one, one
            by `lab.models.build`, or one with another library's mixer.
        tasks: whose rows store pairs, each another number of them.
        config: how to train; None: the lab's settings for each task's length and vocabulary.

    Raises:
        ValueError: for rows without pairs, no task, or one with more tokens than the model.
        DivergedError: when training diverges.
    """
    if not tasks:
        raise ValueError("tasks is empty, must hold at least one")
    found = []
    for task in sorted(tasks, key=_count_pairs):
        model = make_model()
        check_sizes(task, model)
        chosen = config
        if chosen is None:
            width = model.cfg.d_model
            defaults = get_protocol_defaults("lab", task.seq_len, task.vocab_size, width)
            # Without those of the model.
            known = {name: of for name, of in defaults.items() if name in vars(TrainConfig())}
            chosen = replace(TrainConfig(), **known)
        state = start(model.train(), chosen, "fp32")
        for _row in fit(task, state, chosen):
            pass
        result = evaluate(
            task,
            model.eval(),
            rows=chosen.test_rows,
            rows_at_once=chosen.batch_size,
            seed=chosen.seed,
        )
        found.append((_count_pairs(task), result, task.chance, state.step, chosen.solved_at))
    return Capacity(
        pairs=np.array([pairs for pairs, *_ in found]),
        accuracy=np.array([result.accuracy for _, result, *_ in found]),
        interval=np.array([result.interval for _, result, *_ in found]),
        chance=np.array([chance for *_, chance, _, _ in found]),
        steps=np.array([steps for *_, steps, _ in found]),
        solved_at=found[0][-1],
    )


def _count_pairs(task: Task) -> int:
    batch = task.batch(split="test", size=1)
    if not has_pairs(batch):
        raise ValueError(f"task={task.name}: its rows store no pairs")
    return int((batch.links["key_pos"][0] >= 0).sum())

"""The training loop: `fit` takes one step after another and yields a `Row` for each.

A step draws rows, computes the gradients of the loss, clips them, sets the learning rate, updates
the weights, and evaluates the model when that is due. Where validation shows that the rows are
learned, longer ones follow (`lab.lengthening`). Nothing here touches the disk.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lab.config import TrainConfig
from lab.files import shorten_message
from lab.intervals import clip_share
from lab.layers.routed import collect_balance_losses
from lab.lengthening import Stage, ends_stage, list_stages
from lab.models import LanguageModel
from lab.models.evaluation import evaluate, score
from lab.ops.cross_entropy import linear_cross_entropy
from lab.ops.squared_error import linear_squared_error
from lab.seeding import fix_seed
from lab.training.graphs import RecordedStep, can_record
from lab.training.optimizers import build_optimizers
from tasks.base import Batch, Schedule, Task, find_scored
from tasks.mixture import Mixture
from tasks.reader import BatchReader

VALIDATION_STEPS = 4
"""Training steps that have as many rows as a validation; it takes about a twentieth of the time."""
DIVERGED_AT = 4.0
"""A loss this many times the larger of the first loss and a blind guess's has diverged."""

BELOW, LEAST = 0.1, 0.1
"""The rate falls below this share of wrong answers, down to this share of the peak; halvings come
on top."""
GAIN = 0.05
"""Wrong answers must fall by this share to count as a new best: less may be luck."""
PATIENCE = 4
"""Validations in a row below `BELOW` without a new best, after which the rate is halved."""
MOST_HALVINGS = 3


class DivergedError(Exception):
    """Training diverged: the loss or the gradient is not finite, or the loss exploded."""


@dataclass
class Annealing:
    """What the validations at the full row length have shown so far.

    The rate is in proportion to the root of the share of wrong answers, from the peak at 10 % of
    them down to a tenth of it: what is left to learn decides when the noise of large steps is in
    the way, not the number of steps. A run whose answers get no better at that rate has it halved,
    unless all are right.

    Attributes:
        wrong: share of wrong answers in the last validation; 1 before.
        least: the last new best.
        waits: validations since then, since the rate was last halved, or since too many answers
            or none were wrong.
        halvings: how often the rate was halved.
    """

    wrong: float = 1.0
    least: float = 1.0
    waits: int = 0
    halvings: int = 0

    def observe(self, wrong: float) -> None:
        """Take in the share of wrong answers of another validation."""
        self.wrong = wrong
        if wrong < (1 - GAIN) * self.least:
            self.least, self.waits = wrong, 0
        elif wrong == 0 or wrong >= BELOW:  # nothing, or much, is left to learn
            self.waits = 0
        elif self.halvings < MOST_HALVINGS:
            self.waits += 1
            if self.waits == PATIENCE:
                self.halvings, self.waits = self.halvings + 1, 0

    @property
    def share(self) -> float:
        """The rate, as a share of its peak."""
        return min(1.0, max(LEAST, math.sqrt(self.wrong / BELOW))) * 0.5**self.halvings


@dataclass
class TrainingState:
    """Everything that training changes.

    Attributes:
        model: whose weights are trained.
        optimizers: by name.
        step: steps taken.
        rows: training rows seen.
        stage: index of the current stage among `list_stages`.
        stage_step: steps taken before it began.
        first_loss: of the first step, nats.
        precision: "fp32" or "bf16"; empty before it is chosen.
        threads: of the CPU; 0 before.
        annealing: what schedule "error" follows.
    """

    model: LanguageModel
    optimizers: dict[str, torch.optim.Optimizer]
    step: int = 0
    rows: int = 0
    stage: int = 0
    stage_step: int = 0
    first_loss: float | None = None
    precision: str = ""
    threads: int = 0
    annealing: Annealing = field(default_factory=Annealing)


@dataclass(frozen=True)
class Row:
    """What one training step did.

    Attributes:
        step: steps taken so far, this one included.
        seq_len: tokens of the task's rows in this stage of training.
        loss: mean cross-entropy of the batch at scored positions, nats, or squared error.
        accuracy: share of the batch's scored positions answered with the target, or explained
            variance (as in `lab.models.evaluation.Evaluation`). Those below count every right
            answer where there are several.
        learning_rate: of this step.
        grad_norm: Euclidean norm of the whole gradient before clipping.
        seconds: time of the step, without evaluation.
        cpu_seconds: processor time of the step in all threads, with the evaluation on validation
            rows, which decides how training goes on, but without the test.
        validation_loss: on held-out rows of this length, if this step was evaluated.
        validation_accuracy: likewise.
        test_loss: on the test split, if validation suggests that the task is solved, and after the
            last step.
        test_accuracy: likewise.
        test_interval: 95 % interval of the test accuracy over other rows.
    """

    step: int
    seq_len: int
    loss: float
    accuracy: float
    learning_rate: float
    grad_norm: float
    seconds: float
    cpu_seconds: float
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    test_interval: tuple[float, float] | None = None


class StepResult(NamedTuple):
    """What a forward and backward pass found, besides the gradients.

    Attributes:
        loss: mean cross-entropy at the scored positions, nats, or squared error, without balance
            losses.
        correct: how many of them have the right answer, or the sum of squares explained.
        scored: how many there are.
    """

    loss: Tensor
    correct: Tensor
    scored: Tensor


def start(model: LanguageModel, config: TrainConfig, precision: str = "") -> TrainingState:
    """Return the state before the first step, with the optimizers of the configuration.

    Args:
        model: whose weights are trained.
        config: how.
        precision: "fp32" or "bf16"; empty where it is still to be chosen.
    """
    return TrainingState(model, build_optimizers(model, config), precision=precision)


def fit(
    task: Task,
    state: TrainingState,
    config: TrainConfig,
    on_note: Callable[[str], None] = lambda text: None,
    *,
    may_record: bool = True,
) -> Iterator[Row]:
    """Train to the end, yielding one `Row` a step; then `state` is complete and can be saved.

    Training ends after the last step, or when a shorter stage is not learned in its own limit of
    steps and `TrainConfig.unlearned` does not let rows lengthen all the same. Rows of the task are
    numbered in the order of training, so a state alone tells the next row.

    On a GPU, a step is a CUDA graph from the second one of a stage on, unless rows are vectors;
    hooks that are attached later are not called.

    Args:
        task: where rows come from.
        state: changed in place; its precision is "fp32" or "bf16" (autocast of the forward pass;
            weights stay fp32).
        config: how to train.
        on_note: called with what is done now, before what takes longer than a step.
        may_record: whether steps on a GPU may become CUDA graphs.

    Raises:
        ValueError: as `check`.
        DivergedError: before taking a step that would make weights non-finite.
    """
    check(task, config)
    model, optimizers, stages = state.model, state.optimizers.values(), list_stages(task, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    device = trained[0].device
    lengths_vary = isinstance(task, Mixture) and "seq_len" in task.varied
    may_record &= can_record(device) and not lengths_vary and not task.vectors
    blind_loss = task.blind_loss
    warm: Stage | None = None
    graph: RecordedStep | None = None
    reader = BatchReader(task, size=config.batch_size, seed=config.seed, device=device)
    while True:
        stage, taken = stages[state.stage], state.step - state.stage_step
        if state.step >= config.max_steps or taken >= stage.max_steps:
            return
        began, cpu_began = time.perf_counter(), time.process_time()
        first = find_first_row(config, state.rows)

        # A stage begins by calls: then the optimizers have a state of all that a graph updates.
        if warm is not stage:
            reader = BatchReader(stage.task, size=stage.batch_size, seed=config.seed, device=device)
            graph = None
            model.zero_grad(set_to_none=True)
        elif may_record and graph is None:
            try:
                graph = RecordedStep(differentiate, state, stage, config, first)
            except RuntimeError as error:
                may_record = False
                model.zero_grad(set_to_none=True)
                on_note(f"no CUDA graph: {shorten_message(error)}")

        # Its rows, and the gradients of the loss on them, clipped. Dropout has its own random
        # numbers at each step, also after a resume.
        with fix_seed((config.seed * 1_000_003 + state.step + 1) % 2**63, device):
            if graph is not None:
                loss, correct, scored, norm = graph.differentiate(first)
            else:
                batch = reader.read(first)
                if lengths_vary:  # the model is causal: nothing reads what follows the last answer
                    batch = batch.trim()
                found = differentiate(model, batch, state.precision)
                total = nn.utils.clip_grad_norm_(trained, config.clip_norm)
                loss, correct, scored, norm = (number.item() for number in (*found, total))
                if task.vectors:
                    scored = stage.task.count_asked(batch).sum().item()
        _raise_if_diverged(state, loss, norm, blind_loss)

        # The update, at the rate of this step.
        rate = compute_learning_rate(config, state.step + 1, state.annealing.share)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                # Tables are learned in the first stage; their rate would keep longer rows noisy.
                group["lr"] = rate * (group.get("rate", 1.0) if state.stage == 0 else 1.0)
        if graph is not None:
            graph.update()
        else:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        if graph is not None and not graph.whole:  # rows differ too much for a graph
            graph, may_record = None, False
            model.zero_grad(set_to_none=True)
        warm = stage
        state.step, state.rows = state.step + 1, state.rows + stage.batch_size
        row = Row(
            step=state.step,
            seq_len=stage.task.seq_len,
            loss=loss,
            accuracy=clip_share(correct, scored),
            learning_rate=rate,
            grad_norm=norm,
            seconds=time.perf_counter() - began,
            cpu_seconds=time.process_time() - cpu_began,
        )

        # What it is worth, and whether longer rows follow.
        taken = state.step - state.stage_step
        ends = state.step == config.max_steps or taken == stage.max_steps
        if ends or state.step % config.eval_every == 0:
            last = stage is stages[-1]
            row = _evaluate(row, stage, model, config, on_note, last=last)
            accuracy = row.validation_accuracy or 0.0
            if last:
                state.annealing.observe(1 - accuracy)
            elif ends_stage(stage, config, taken, accuracy) and state.step < config.max_steps:
                _enter_next_stage(state, stages, config)
        yield row


def differentiate(
    model: LanguageModel, batch: Batch, precision: str, per_row: int | None = None
) -> StepResult:
    """Add the gradient of the loss on a batch to a model's parameters.

    Args:
        model: whose weights are trained.
        batch: the rows.
        precision: "fp32" or "bf16".
        per_row: as in `lab.models.evaluation.score`.
    """
    with collect_balance_losses(model) as imbalances:
        hidden, weight, targets = score(model, batch, precision, per_row)
    padded = per_row is not None
    if targets.is_floating_point():
        loss, correct = linear_squared_error(hidden, weight, targets)
    else:
        loss, correct = linear_cross_entropy(hidden, weight, targets, padded=padded)
    sum(imbalances, start=loss).backward()
    return StepResult(loss.detach(), correct, find_scored(targets).sum())


def check(task: Task, config: TrainConfig) -> None:
    """Validate a task together with its training options.

    Raises:
        ValueError: for a schedule over a training set that repeats, which would repeat the
            schedule; or as `list_stages`.
    """
    for name, values in task.options.items():
        if isinstance(values, Schedule) and config.train_rows is not None:
            raise ValueError(
                f"{name}={values.first}:{values.last}: a schedule over {values.rows:,} rows needs "
                f"new rows, but train_rows={config.train_rows:,} repeats them; choose one"
            )
    list_stages(task, config)


def find_first_row(config: TrainConfig, seen: int) -> int:
    """Return the number of the next training row, after `seen` rows."""
    return seen if config.train_rows is None else seen % config.train_rows


def compute_learning_rate(config: TrainConfig, step: int, annealed: float = 1.0) -> float:
    """Return the rate of a step (from 1): a linear warm-up, then the configuration's schedule.

    It is constant, or a cosine down to a tenth of the peak, or "error" (`Annealing`).

    Args:
        config: how to train.
        step: its number.
        annealed: share of the peak that schedule "error" asks for.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if config.schedule == "error":
        return peak * annealed
    if config.schedule == "constant":
        return peak
    progress = (step - warmup) / max(1, config.max_steps - warmup)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def count_validation_rows(stage: Stage, config: TrainConfig) -> int:
    """Return on how many validation rows a stage is evaluated."""
    return min(config.test_rows, VALIDATION_STEPS * stage.batch_size)


def _raise_if_diverged(state: TrainingState, loss: float, norm: float, blind_loss: float) -> None:
    step = state.step + 1
    if not math.isfinite(loss):
        raise DivergedError(f"loss={loss} at step {step}")
    if not math.isfinite(norm):
        raise DivergedError(f"gradient norm={norm} at step {step}")
    if state.first_loss is None:
        state.first_loss = loss
    bound = DIVERGED_AT * max(state.first_loss, blind_loss)
    if loss > bound:
        raise DivergedError(f"loss={loss:.3g} at step {step}, above {bound:.3g}")


def _evaluate(
    row: Row,
    stage: Stage,
    model: LanguageModel,
    config: TrainConfig,
    on_note: Callable[[str], None],
    *,
    last: bool,
) -> Row:
    """Return the row of a step with what the model scores after it.

    It is evaluated on validation rows, and in the last stage on the test split where that may end
    the run.
    """
    began = time.process_time()
    found = evaluate(
        stage.task,
        model,
        rows=count_validation_rows(stage, config),
        rows_at_once=stage.batch_size,
        seed=config.seed,
        split="validation",
    )
    row = replace(
        row,
        validation_loss=found.loss,
        validation_accuracy=found.accuracy,
        cpu_seconds=row.cpu_seconds + time.process_time() - began,
    )
    promising = config.early_stop and found.accuracy >= config.solved_at
    if not last or not (promising or row.step == config.max_steps):
        return row
    on_note(f"evaluating {config.test_rows:,} test rows")
    test = evaluate(
        stage.task,
        model,
        rows=config.test_rows,
        rows_at_once=config.batch_size,
        seed=config.seed,
    )
    return replace(
        row, test_loss=test.loss, test_accuracy=test.accuracy, test_interval=test.interval
    )


def _enter_next_stage(state: TrainingState, stages: tuple[Stage, ...], config: TrainConfig) -> None:
    """Let training go on with the rows of the next stage."""
    state.stage, state.stage_step = state.stage + 1, state.step
    if config.train_rows is not None:  # a batch begins at a multiple of its size
        size = stages[state.stage].batch_size
        state.rows = -(-state.rows // size) * size

"""The training loop: `fit` yields one `Row` a step and touches no disk."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from lab.config import TrainConfig
from lab.files import RunError
from lab.laws.seeding import fix_seed
from lab.lengthening import Stage, list_stages
from lab.machine.clocks import Spent, read_clocks
from lab.models import LanguageModel
from lab.training.annealing import Annealing
from lab.training.gradients import StepResult, differentiate
from lab.training.optimizers import build_optimizers
from lab.training.recorded_step import RecordedStep
from lab.training.row import Row
from lab.training.together import differentiate_together, update_together
from lab.training.validation import evaluate_stage
from tasks.base import Batch, Schedule, Task
from tasks.mixture import Mixture

if TYPE_CHECKING:
    from lab.training.parallel import Leader

DIVERGED_AT = 4.0
"""A loss this many times the larger of the first loss and ln(vocabulary) has diverged."""


class DivergedError(Exception):
    """Training diverged: the loss or the gradient is not finite, or the loss exploded."""


class LostProcessError(RunError):
    """Another process that trains this run (`lab.training.parallel`) has ended."""


@dataclass
class TrainingState:
    """Everything that training changes.

    Attributes:
        model: whose weights are trained.
        optimizers: by name.
        step: steps taken.
        rows: training rows seen.
        stage: index of the current stage among `lab.lengthening.list_stages`.
        stage_step: steps taken before it began.
        first_loss: of the first step, nats.
        precision: what "auto" chose for this run; empty before.
        threads: of the CPU, likewise; 0 before.
        annealing: what schedule "error" follows.
        shared: whether it computes gradients together with other runs (`lab.training.lanes`).
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
    shared: bool = False


def start(model: LanguageModel, config: TrainConfig) -> TrainingState:
    """Return the state before the first step, with the optimisers of the configuration."""
    return TrainingState(model, build_optimizers(model, config))


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
    Training ends after the last step, or when a shorter stage has taken its most steps.

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


class Stepper:
    """Takes the steps of one training: draws rows, and updates the weights by their gradients.

    The gradients may be computed elsewhere, with those of other trainings (`lab.training.lanes`).

    Args:
        task: where rows come from.
        state: changed in place.
        config: how to train.
        on_note: called with what is done now, before what takes longer than a step.
        leader: of other processes that compute shares of the gradients; None: there are none.

    Attributes:
        may_record: whether its steps may become CUDA graphs.
        recording: of the next steps, its own or of several trainings; None: they are calls.
        lane: its place in the recording.
        taken: the stage and the precision of the last step; None before the first.

    Raises:
        ValueError: as `check`.
    """

    def __init__(
        self,
        task: Task,
        state: TrainingState,
        config: TrainConfig,
        on_note: Callable[[str], None] = lambda text: None,
        leader: "Leader | None" = None,
    ):
        check(task, config)
        self.task, self.state, self.config, self.on_note = task, state, config, on_note
        self._leader = leader
        self._stages = list_stages(task, config)
        self._device = next(state.model.parameters()).device
        self._parameters = [p for p in state.model.parameters() if p.requires_grad]
        self._lengths_vary = isinstance(task, Mixture) and "seq_len" in task.varied
        self.may_record = self._device.type == "cuda" and leader is None and not self._lengths_vary
        self.recording: RecordedStep | None = None
        self.lane = 0
        self.taken: tuple[Stage, str] | None = None

    @property
    def stage(self) -> Stage:
        """The current stage."""
        return self._stages[self.state.stage]

    @property
    def first_row(self) -> int:
        """The number of the first row of the next step."""
        return find_first_row(self.config, self.state.rows)

    @property
    def recorded(self) -> bool:
        """Whether the next step is a CUDA graph."""
        return self.recording is not None

    def take_step(self, precision: str) -> Row | None:
        """Draw rows, compute gradients and update the weights; None at the end of training.

        Args:
            precision: as for `fit`.

        Raises:
            DivergedError: before weights would become non-finite.
        """
        began = read_clocks()
        batch = self.draw()
        if batch is None:
            return None
        (outcome,) = differentiate_together([self], [batch], precision)
        return self.update(outcome, began)

    def draw(self) -> Batch | None:
        """Return the rows of the next step; None at the end of training."""
        state, config, stage = self.state, self.config, self.stage
        if state.step >= config.max_steps or state.step - state.stage_step >= stage.max_steps:
            return None
        changed = self.taken is not None and self.taken[0] is not stage
        if self.recording is not None and (changed or not self.recording.whole):
            self.may_record = changed
            self.stop_recording()
        first = self.first_row
        if self.recording is not None:
            return self.recording.draw(self.lane, first)
        batch = stage.task.batch(
            start=first, size=stage.batch_size, seed=config.seed, device=self._device
        )
        # The model is causal: nothing reads what follows the last answer.
        return batch.trim() if self._lengths_vary else batch

    def differentiate(self, batch: Batch, precision: str) -> StepResult:
        """Set the gradients of the next step, with its own random numbers, also after a resume."""
        seed = (self.config.seed * 1_000_003 + self.state.step + 1) % 2**63
        with fix_seed(seed, self._device):
            if self.recording is not None:
                return self.recording.differentiate()[0]
            if self._leader is None:
                return differentiate(self.state.model, batch, precision)
            return self._leader.differentiate(batch, self.state.stage, self.first_row)

    def update(self, outcome: StepResult, began: Spent) -> Row:
        """Take the step whose gradients were set, and evaluate the model if it is time to.

        Args:
            outcome: of the pass that set the gradients.
            began: when the step began.

        Raises:
            DivergedError: before weights would become non-finite.
        """
        row = self.approve(outcome)
        update_together([self])
        return self.conclude(row, read_clocks() - began)

    def approve(self, outcome: StepResult) -> Row:
        """Clip the gradients that were set, and set the rates of the update that is to follow.

        Returns the step's row, without its times.

        Raises:
            DivergedError: where weights would become non-finite.
        """
        state, config, step = self.state, self.config, self.state.step + 1
        rate = compute_learning_rate(config, step, state.annealing.share)
        norm = outcome.norm
        if norm is None:
            norm = nn.utils.clip_grad_norm_(self._parameters, config.clip_norm)
        value, grad_norm = outcome.loss.item(), norm.item()
        _raise_if_diverged(state, step, value, grad_norm, self.task.vocab_size)
        for optimizer in state.optimizers.values():
            for group in optimizer.param_groups:
                # Tables are learned in the first stage; their rate would keep longer rows noisy.
                group["lr"] = rate * (group.get("rate", 1.0) if state.stage == 0 else 1.0)
        return Row(
            step=step,
            seq_len=self.stage.task.seq_len,
            loss=value,
            accuracy=outcome.correct.item() / int(outcome.scored),
            learning_rate=rate,
            grad_norm=grad_norm,
            seconds=0.0,
            cpu_seconds=0.0,
        )

    def conclude(self, row: Row, spent: Spent) -> Row:
        """Count the step whose update was taken, and evaluate the model if it is time to.

        Args:
            row: what `approve` returned.
            spent: by the step.
        """
        state, config, stage, step = self.state, self.config, self.stage, row.step
        last = stage is self._stages[-1]
        state.step, state.rows = step, state.rows + stage.batch_size
        row = replace(row, seconds=spent.wall, cpu_seconds=spent.cpu)
        ends = step == config.max_steps or step - state.stage_step == stage.max_steps
        if ends or step % config.eval_every == 0:
            row = evaluate_stage(row, stage, state.model, config, self.on_note, last=last)
            assert row.validation_accuracy is not None
            if last:
                state.annealing.observe(1 - row.validation_accuracy)
            learned = row.validation_accuracy >= config.lengthen_at
            if learned and not last and step < config.max_steps:
                enter_next_stage(state, self._stages, config)
        return row

    def stop_recording(self) -> None:
        """Take the next steps by calls, and free what a recording holds."""
        self.recording = None
        self.state.model.zero_grad(set_to_none=True)


def enter_next_stage(state: TrainingState, stages: Sequence[Stage], config: TrainConfig) -> None:
    """Let training go on with the rows of the next stage."""
    state.stage, state.stage_step = state.stage + 1, state.step
    if config.train_rows is not None:  # a batch begins at a multiple of its size
        size = stages[state.stage].batch_size
        state.rows = -(-state.rows // size) * size


def check(task: Task, config: TrainConfig) -> None:
    """Validate a task together with its training options.

    Raises:
        ValueError: for a schedule over a training set that repeats, which would repeat the
            schedule; or as `lab.lengthening.list_stages`.
    """
    for name, values in task.options.items():
        if isinstance(values, Schedule) and config.train_rows is not None:
            raise ValueError(
                f"{name}={values.first}:{values.last}: goes over {values.rows:,} rows, but of "
                f"train_rows={config.train_rows:,} each comes again; must be all new"
            )
    list_stages(task, config)


def find_first_row(config: TrainConfig, seen: int) -> int:
    """Return the number of the next training row, after `seen` rows."""
    return seen if config.train_rows is None else seen % config.train_rows


def _raise_if_diverged(
    state: TrainingState, step: int, loss: float, grad_norm: float, vocab_size: int
) -> None:
    if not math.isfinite(loss):
        raise DivergedError(f"loss={loss} at step {step}")
    if not math.isfinite(grad_norm):
        raise DivergedError(f"gradient norm={grad_norm} at step {step}")
    if state.first_loss is None:
        state.first_loss = loss
    bound = DIVERGED_AT * max(state.first_loss, math.log(vocab_size))
    if loss > bound:
        raise DivergedError(f"loss={loss:.3g} at step {step}, above {bound:.3g}")

"""The steps of one training: rows, gradients, update, and the evaluations that fall due."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from lab.config import TrainConfig
from lab.laws.seeding import fix_seed
from lab.lengthening import Stage, ends_stage, list_stages
from lab.machine.clocks import Spent, read_clocks
from lab.training.annealing import compute_learning_rate
from lab.training.divergence import DivergedError, raise_if_diverged
from lab.training.gradients import StepResult, differentiate
from lab.training.recorded_step import RecordedStep
from lab.training.row import Row
from lab.training.state import TrainingState, enter_next_stage
from lab.training.together import advance_together
from lab.training.validation import evaluate_stage
from tasks.base import Batch, Schedule, Task
from tasks.mixture import Mixture
from tasks.reader import BatchReader

if TYPE_CHECKING:
    from lab.training.parallel import Leader


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
        self._reader: BatchReader | None = None
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
        (row,) = advance_together([self], [batch], precision)
        if isinstance(row, DivergedError):
            raise row
        return self.conclude(row, read_clocks() - began)

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
        if self._reader is None or self._reader.task is not stage.task:
            self._reader = BatchReader(
                stage.task, size=stage.batch_size, seed=config.seed, device=self._device
            )
        batch = self._reader.read(first)
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

    def approve(self, outcome: StepResult, precision: str) -> Row:
        """Clip the gradients that were set, and set the rates of the update that is to follow.

        Returns the step's row, without its times.

        Raises:
            DivergedError: where weights would become non-finite.
        """
        state, config, step = self.state, self.config, self.state.step + 1
        self.taken = self.stage, precision
        rate = compute_learning_rate(config, step, state.annealing.share)
        norm = outcome.norm
        if norm is None:
            norm = nn.utils.clip_grad_norm_(self._parameters, config.clip_norm)
        value, grad_norm = outcome.loss.item(), norm.item()
        raise_if_diverged(state, step, value, grad_norm, self.task.vocab_size)
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
        taken = step - state.stage_step
        ends = step == config.max_steps or taken == stage.max_steps
        if ends or step % config.eval_every == 0:
            row = evaluate_stage(row, stage, state.model, config, self.on_note, last=last)
            assert row.validation_accuracy is not None
            if last:
                state.annealing.observe(1 - row.validation_accuracy)
            grows = ends_stage(stage, config, taken, row.validation_accuracy)
            if grows and not last and step < config.max_steps:
                enter_next_stage(state, self._stages, config)
        return row

    def start_recording(self, recording: RecordedStep, lane: int) -> None:
        """Take the next steps as a lane of a recording."""
        self.recording, self.lane = recording, lane

    def refuse_recording(self, why: str) -> None:
        """Take all further steps by calls."""
        self.may_record = False
        self.stop_recording()
        self.on_note(f"no CUDA graph: {why}")

    def stop_recording(self) -> None:
        """Take the next steps by calls, and free what a recording holds."""
        self.recording = None
        self.state.model.zero_grad(set_to_none=True)


def check(task: Task, config: TrainConfig) -> None:
    """Validate a task together with its training options.

    Raises:
        ValueError: for a schedule over a training set that repeats, which would repeat the
            schedule; or as `lab.lengthening.list_stages`.
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

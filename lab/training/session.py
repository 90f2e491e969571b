"""What a run keeps while it trains: metrics, weights, checkpoints, and in the end its result."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from signal import Signals
from typing import Any

import torch

from lab.config import Runtime, TrainConfig
from lab.files import explain_write_errors, lock
from lab.training.certificate import describe_certificate, write_certificate
from lab.training.conclusion import Ending, summarize
from lab.training.history import WeightsSchedule
from lab.training.loggers import open_logger
from lab.training.missing import check_whole
from lab.training.row import Row
from lab.training.runs import Run


class Session:
    """The training of a run, from its newest checkpoint or from the start, in a locked folder.

    Args:
        run: what to train; its folder is claimed.
        runtime: minutes, checkpoint interval, history, logger.
        device: where to compute.
        on_row: called after every step.
        on_note: called with what is done now, before what takes longer than a step.
        step: of the checkpoint to go on from; None: the newest.

    Raises:
        RunError: when the folder cannot be used or written.
    """

    def __init__(
        self,
        run: Run,
        runtime: Runtime,
        device: torch.device,
        on_row: Callable[[Row], None],
        on_note: Callable[[str], None],
        step: int | None = None,
    ):
        self.run = run = run.recall_precision()
        self.runtime, self.device = runtime, device
        self.on_row, self.on_note = on_row, on_note
        self.state = run.load_state(device, step)
        check_whole(run, self.state)
        run.rewind(self.state.step)
        self._record: list[Callable[[Row], None]] = []
        self._began = time.monotonic()
        self._pace = WeightsSchedule()
        # As if it had not been interrupted.
        for before in run.read_metrics():
            self._pace.update(before["step"], before["accuracy"])

    def certify(self) -> str:
        """Certify all layers if asked, by default a user's alone; keep and return the result.

        The text is empty where nothing is certified: also in a run that is resumed.

        Raises:
            UnlawfulError: when a layer breaks a law that training relies on.
        """
        run, asked = self.run, self.runtime.certify
        if self.state.step or not (run.model.model is not None if asked is None else asked):
            return ""
        from lab.training.certifying import certify_layers

        self.on_note("certifying the layers")
        certificate = certify_layers(run, self.device, every=asked is True)
        write_certificate(run, certificate)
        return f"{describe_certificate(certificate)} ({certificate['cpu_seconds']:.1f} s)"

    def keep_precision(self) -> None:
        """Write the precision that was chosen into config.json, where it was left to the machine.

        Raises:
            RunError: when it cannot be written.
        """
        if self.run.train.precision == "auto":
            self.run = self.run.with_precision(self.state.precision)
            with explain_write_errors(self.run.path):
                self.run.write_config()

    @contextmanager
    def record(self) -> Iterator[None]:
        """Open the metrics and the logger for the length of a `with` block."""
        with (
            self.run.record_rows() as record,
            open_logger(self.runtime.log, self.run, self.state.step) as log,
        ):
            self._began = time.monotonic()
            self._record = [record, log, self.on_row]
            yield

    def is_solved(self) -> bool:
        """Whether the run had solved its task when it was stopped."""
        return _is_solved(self.run.read_metrics().last_test, self.state.step, self.run.train)

    def keep(self, row: Row, find_interrupt: Callable[[], Signals | None]) -> Ending | None:
        """Record a step, keep weights and checkpoints that are due; return why training ends.

        Args:
            row: the step.
            find_interrupt: returns the signal that asks to stop, if one came.
        """
        self.take_in(row)
        # Only now: a signal may come while the step is recorded.
        ending, due = self.judge(row, find_interrupt())
        if due:
            self.run.save_checkpoint(self.state)
        return ending

    def take_in(self, row: Row) -> None:
        """Record a step, and keep the weights if they are due."""
        for record in self._record:
            record(row)
        due = self._pace.update(row.step, row.accuracy)
        if self.runtime.history and (due or self._has_lengthened(row)):
            self.run.keep_weights(self.state)

    def judge(self, row: Row, interrupt: Signals | None) -> tuple[Ending | None, bool]:
        """Return why training ends after a step, if it does, and whether a checkpoint is due."""
        runtime = self.runtime
        late = (
            runtime.max_minutes is not None
            and time.monotonic() - self._began >= 60 * runtime.max_minutes
        )
        solved = _is_solved(vars(row), self.state.step, self.run.train)
        if solved or interrupt or late:
            return Ending("solved") if solved else Ending("interrupted", interrupt), True
        return None, self._has_lengthened(row) or row.step % runtime.checkpoint_every == 0

    def _has_lengthened(self, row: Row) -> bool:
        return self.state.stage_step == row.step

    def conclude(self, ending: Ending) -> dict[str, Any]:
        """Write the result of the run, and return it."""
        if ending.stopped != "diverged":
            self.on_note("evaluating shortcuts, and weights set by hand")
        result = summarize(self.run, self.state, ending, self.device)
        self.run.write_result(result)
        return result


@contextmanager
def claim_folder(run: Run) -> Iterator[dict[str, Any] | None]:
    """Claim and lock a run's folder, and remove what a killed process left behind in it.

    Yields the result of a run that has ended, solved or out of steps; else None.

    Raises:
        RunError: when the folder cannot be used or written.
    """
    run.claim()
    with lock(run.path):
        run.clear_leftovers()
        yield run.read_final_result()


def _is_solved(row: Mapping[str, Any], step: int, config: TrainConfig) -> bool:
    """Whether the evaluation in a row of metrics, if it is of this step, ends the run."""
    accuracy = row.get("test_accuracy") if row.get("step") == step else None
    return config.early_stop and accuracy is not None and accuracy >= config.solved_at

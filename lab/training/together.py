"""Steps of several trainings whose gradients are one computation, or of a single one.

Where GPUs can, the steps are recorded (`lab.training.recorded_step`) as soon as each training has
taken one in its stage, and again when the trainings that compute together are others.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab.files import shorten_message
from lab.training.divergence import DivergedError
from lab.training.gradients import StepResult, differentiate_lanes
from lab.training.recorded_step import RecordedStep
from lab.training.row import Row
from tasks.base import Batch

if TYPE_CHECKING:
    from lab.training.stepper import Stepper


def advance_together(
    steppers: Sequence["Stepper"], batches: Sequence[Batch], precision: str
) -> list[Row | DivergedError]:
    """Compute the gradients of the next step of each training, and update its weights.

    Args:
        steppers: of the trainings; their models have one shape.
        batches: the rows that each has drawn, of one length.
        precision: "fp32" or "bf16".

    Returns:
        A row for each, without its times, for `Stepper.conclude`; or why the training diverged,
        whose weights stay as they are.
    """
    outcomes = _differentiate(steppers, batches, precision)
    rows: list[Row | DivergedError] = []
    for stepper, outcome in zip(steppers, outcomes, strict=True):
        try:
            rows.append(stepper.approve(outcome, precision))
        except DivergedError as error:
            rows.append(error)
    _update([each for each, row in zip(steppers, rows, strict=True) if isinstance(row, Row)])
    return rows


def _differentiate(
    steppers: Sequence["Stepper"], batches: Sequence[Batch], precision: str
) -> list[StepResult]:
    """Set the gradients of the next step of each training."""
    recording = _record(steppers, precision)
    if len(steppers) == 1:
        return [steppers[0].differentiate(batches[0], precision)]
    if recording is not None:
        return recording.differentiate()
    return differentiate_lanes([each.state.model for each in steppers], batches, precision)


def _update(steppers: Sequence["Stepper"]) -> None:
    """Update the weights of the trainings that go on, of those that were differentiated."""
    recording = steppers[0].recording if steppers else None
    if recording is not None and recording.lanes == len(steppers):
        recording.update()
        return
    for stepper in steppers:
        for optimizer in stepper.state.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def _record(steppers: Sequence["Stepper"], precision: str) -> RecordedStep | None:
    """Return the recording of the next step of trainings; None if it has to be taken by calls."""
    first = steppers[0].recording
    same = all(stepper.recording is first for stepper in steppers)
    if first is not None and same and first.lanes == len(steppers):
        return first
    first = None  # so that its memory is free before there is another
    for stepper in steppers:
        if stepper.recording is not None:
            stepper.stop_recording()
    for stepper in steppers:
        taken = stepper.taken == (stepper.stage, precision)
        if not (stepper.may_record and taken):
            return None
    try:
        recording = RecordedStep(steppers, precision)
    except RuntimeError as error:
        for stepper in steppers:
            stepper.refuse_recording(shorten_message(error))
        return None
    for lane, stepper in enumerate(steppers):
        stepper.start_recording(recording, lane)
    return recording

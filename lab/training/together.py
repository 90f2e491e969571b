"""Steps of several trainings whose gradients are one computation, or of a single one.

Where GPUs can, the steps are recorded (`lab.training.recorded_step`) as soon as each training has
taken one in its stage, and again when the trainings that compute together are others.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab.files import shorten_message
from lab.training.gradients import StepResult, differentiate_lanes
from lab.training.recorded_step import RecordedStep
from tasks.base import Batch

if TYPE_CHECKING:
    from lab.training.stepper import Stepper


def differentiate_together(
    steppers: Sequence["Stepper"], batches: Sequence[Batch], precision: str
) -> list[StepResult]:
    """Set the gradients of the next step of each training.

    Args:
        steppers: of the trainings; their models have one shape.
        batches: the rows that each has drawn, of one length.
        precision: "fp32" or "bf16".
    """
    recording = _record(steppers, precision)
    for stepper in steppers:
        stepper.taken = stepper.stage, precision
    if len(steppers) == 1:
        return [steppers[0].differentiate(batches[0], precision)]
    if recording is not None:
        return recording.differentiate()
    return differentiate_lanes([each.state.model for each in steppers], batches, precision)


def update_together(steppers: Sequence["Stepper"]) -> None:
    """Update the weights of trainings whose gradients and rates were set.

    Args:
        steppers: those that go on, of those whose gradients were computed together.
    """
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
            stepper.may_record = False
            stepper.stop_recording()
            stepper.on_note(f"no CUDA graph: {shorten_message(error)}")
        return None
    for lane, stepper in enumerate(steppers):
        stepper.recording, stepper.lane = recording, lane
    return recording

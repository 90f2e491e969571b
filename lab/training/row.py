"""What training measures at one step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """What one training step did.

    Attributes:
        step: steps taken so far, this one included.
        seq_len: tokens of the task's rows in this stage of training.
        loss: mean cross-entropy of the batch at scored positions, nats.
        accuracy: share of the batch's scored positions with the right answer.
        learning_rate: of this step.
        grad_norm: Euclidean norm of the whole gradient before clipping.
        seconds: time of the step, without evaluation.
        validation_loss: on held-out rows of this length, if this step was evaluated.
        validation_accuracy: likewise.
        test_loss: on the test split, if validation suggests that the task is solved, and after the
            last step.
        test_accuracy: likewise.
        test_interval: 95 % interval of the test accuracy over other rows.
        cpu_seconds: processor time of the step in all threads, with the evaluation on validation
            rows, which decides how training goes on, but without the test. Lanes that compute
            together share theirs evenly. None in runs of versions that did not measure it.
    """

    step: int
    seq_len: int
    loss: float
    accuracy: float
    learning_rate: float
    grad_norm: float
    seconds: float
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    test_interval: tuple[float, float] | None = None
    cpu_seconds: float | None = None

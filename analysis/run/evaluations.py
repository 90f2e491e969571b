"""What a run measured on held-out rows while it trained, and on how many rows each time."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from lab.lengthening import list_stages
from lab.training.loop import count_validation_rows
from lab.training.run import Run


@dataclass(frozen=True)
class Evaluations:
    """Evaluations on held-out rows of the length that the run trained at then.

    Attributes:
        steps: training steps before each, ascending.
        rows: on how many rows each was made.
        loss: mean cross-entropy at scored positions, nats.
        accuracy: share of scored positions with the right answer, in [0, 1].
    """

    steps: Int[np.ndarray, " m"]
    rows: Int[np.ndarray, " m"]
    loss: Float[np.ndarray, " m"]
    accuracy: Float[np.ndarray, " m"]


def read_evaluations(run: Run) -> Evaluations:
    """Return the evaluations on a run's record.

    Raises:
        RunError: when the record cannot be read.
    """
    found = run.read_metrics().evaluations
    rows = {
        ("validation", stage.task.seq_len): count_validation_rows(stage, run.train)
        for stage in list_stages(run.task, run.train)
    }
    return Evaluations(
        np.array([one["step"] for one in found], dtype=np.int64),
        np.array(
            [rows.get((one["split"], one["seq_len"]), run.train.test_rows) for one in found],
            dtype=np.int64,
        ),
        np.array([one["loss"] for one in found], dtype=np.float64),
        np.array([one["accuracy"] for one in found], dtype=np.float64),
    )

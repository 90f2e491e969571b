"""Everything that training changes, how it begins, and how it enters a stage."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lab.config import TrainConfig
from lab.lengthening import Stage
from lab.models import LanguageModel
from lab.training.annealing import Annealing
from lab.training.optimizers import build_optimizers


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
    """Return the state before the first step, with the optimizers of the configuration."""
    return TrainingState(model, build_optimizers(model, config))


def enter_next_stage(state: TrainingState, stages: Sequence[Stage], config: TrainConfig) -> None:
    """Let training go on with the rows of the next stage."""
    state.stage, state.stage_step = state.stage + 1, state.step
    if config.train_rows is not None:  # a batch begins at a multiple of its size
        size = stages[state.stage].batch_size
        state.rows = -(-state.rows // size) * size

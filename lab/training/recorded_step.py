"""Training steps on a GPU as three CUDA graphs: drawing rows, their gradients, and the update."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from lab.config import TrainConfig
from lab.hooks import is_watched
from lab.layers.mask import has_oracle_mask
from lab.lengthening import Stage
from lab.machine.cuda_graph import RecordedCall
from lab.models import LanguageModel
from lab.models.block import Block
from lab.models.user_mixer import is_from_lab
from lab.training.gradients import StepResult, differentiate
from tasks.base import IGNORE, Batch, Task


def record_gradients(
    model: LanguageModel, batch: Batch, precision: str
) -> Callable[[], StepResult]:
    """Return what computes a model's gradients on a batch as training does: recorded where it can.

    Args:
        model: whose weights stay as they are.
        batch: the rows.
        precision: "fp32" or "bf16".
    """

    def compute(per_row: int | None = None) -> StepResult:
        model.zero_grad(set_to_none=True)
        return differentiate(model, batch, precision, per_row=per_row)

    if batch.inputs.is_cuda:
        with contextlib.suppress(RuntimeError):
            check_recordable(model)
            per_row = _count_positions(batch)
            return RecordedCall(lambda: compute(per_row), batch.inputs.device)
    return compute


class RecordedStep:
    """The steps of one stage of a training, on one model; as without graphs, up to rounding.

    Hooks that are attached later are not called.

    Args:
        stage: whose rows are drawn.
        start: the number of the next row.
        model: whose weights are trained.
        optimizers: which have taken a step already, so that their state is there.
        config: how to train.
        precision: "fp32" or "bf16".

    Attributes:
        norm: of the last gradients, before they were clipped.
        whole: whether no row had more scored positions than were recorded. If not, the gradients
            were computed once more, call by call.

    Raises:
        RuntimeError: for a model or a task whose gradients no CUDA graph can record.
    """

    norm: Tensor
    whole: bool = True

    def __init__(
        self,
        stage: Stage,
        start: int,
        model: LanguageModel,
        optimizers: Mapping[str, torch.optim.Optimizer],
        config: TrainConfig,
        precision: str,
    ):
        check_recordable(model)
        self._model, self._precision, self._clip_norm = model, precision, config.clip_norm
        self._trained = [p for p in model.parameters() if p.requires_grad]
        device = self._trained[0].device
        links = has_oracle_mask(model)
        self._rows = _Rows(stage.task, stage.batch_size, config.seed, device, links=links)
        self._per_row = _count_positions(self._rows.draw(start))
        self._differentiate = RecordedCall(self._compute, device)
        self._groups = [g for optimizer in optimizers.values() for g in optimizer.param_groups]
        self._rates = [torch.zeros((), device=device) for _ in self._groups]
        with _read_rates(self._groups, self._rates):
            self._update = RecordedCall(
                lambda: [each.step() for each in optimizers.values()], device, rehearse=False
            )

    def draw(self, start: int) -> Batch:
        """Return the rows from a number on; the next ones replace them."""
        return self._rows.draw(start)

    def differentiate(self) -> StepResult:
        """Set the gradients for the rows drawn, clipped."""
        outcome, self.norm, whole = self._differentiate()
        self.whole = bool(whole)
        if self.whole:
            return outcome
        for p in self._trained:
            if p.grad is not None:
                p.grad.zero_()  # the update reads these very tensors
        outcome = differentiate(self._model, self._rows.batch, self._precision)
        self.norm = nn.utils.clip_grad_norm_(self._trained, self._clip_norm)
        return outcome

    def update(self) -> None:
        """Take the step, each group of parameters at its own rate."""
        for held, group in zip(self._rates, self._groups, strict=True):
            held.fill_(group["lr"])
        self._update()

    def _compute(self) -> tuple[StepResult, Tensor, Tensor]:
        """Return the outcome, the norm, and whether all scored positions were computed."""
        batch = self._rows.batch
        self._model.zero_grad(set_to_none=True)
        outcome = differentiate(self._model, batch, self._precision, per_row=self._per_row)
        norm = nn.utils.clip_grad_norm_(self._trained, self._clip_norm)
        whole = ((batch.targets != IGNORE).sum(1) <= self._per_row).all()
        return outcome, norm, whole


class _Rows:
    """Draws training rows into the same tensors, as a CUDA graph if the task can be recorded.

    Args:
        task: whose rows they are.
        size: how many.
        seed: of the rows.
        device: where they are drawn.
        links: whether the batch has links; otherwise none.
    """

    def __init__(self, task: Task, size: int, seed: int, device: torch.device, *, links: bool):
        self._task, self._seed, self._links = task, seed, links
        self._offsets = torch.arange(size, device=device)
        self._numbers = self._offsets.clone()
        try:
            self._recorded = RecordedCall(self._generate, device)
            self.batch = self._recorded()
        except RuntimeError:
            self._recorded, self.batch = None, self._generate()

    def draw(self, start: int) -> Batch:
        """Return the rows from a number on."""
        torch.add(self._offsets, start, out=self._numbers)
        if self._recorded is not None:
            return self._recorded()
        drawn = self._generate()
        self.batch.inputs.copy_(drawn.inputs)
        self.batch.targets.copy_(drawn.targets)
        self.batch.roles.copy_(drawn.roles)
        for name, link in drawn.links.items():
            self.batch.links[name].copy_(link)
        return self.batch

    def _generate(self) -> Batch:
        batch = self._task.generate("train", self._numbers, self._seed)
        # Links are made when they are first read, which would be once for all rows.
        links = batch.links.items() if self._links else ()
        made = {name: link.contiguous() for name, link in links}
        return replace(batch, roles=batch.roles.contiguous(), links=made)


def check_recordable(model: LanguageModel) -> None:
    """Check that a model does nothing beside torch.

    Raises:
        RuntimeError: for one with hooks, or with a mixer that is not the lab's.
    """
    if is_watched(model):
        raise RuntimeError("a hook is attached to the model")
    mixers = [block.mixer for block in model.blocks if isinstance(block, Block)]
    if not all(mixer is None or is_from_lab(mixer) for mixer in mixers):
        raise RuntimeError("what a mixer that is not the lab's does beside torch would be left out")


def _count_positions(batch: Batch) -> int:
    """Return of how many positions a recorded step computes the loss: in each row as many.

    Where rows differ in how many are scored, other rows may have more, so all are taken.
    """
    fewest, most = (batch.targets != IGNORE).sum(1).aminmax()
    return int(most) if fewest == most else batch.targets.shape[1]


@contextmanager
def _read_rates(groups: Sequence[dict], rates: Sequence[Tensor]) -> Iterator[None]:
    """Let optimizers read their rates from tensors on the GPU, for a `with` block."""
    kept = [dict(group) for group in groups]
    for group, rate in zip(groups, rates, strict=True):
        group.update(lr=rate, capturable=True)
    try:
        yield
    finally:
        for group, before in zip(groups, kept, strict=True):
            group.clear()
            group.update(before)

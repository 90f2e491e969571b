"""Training steps on a GPU as CUDA graphs: drawing rows, their gradients, and the update.

The steps of several trainings that compute together, as lanes, are one graph of the gradients of
all and one of their updates; each draws its own rows.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lab.hooks import is_watched
from lab.layers.mask import has_oracle_mask
from lab.machine.cuda_graph import RecordedCall
from lab.models import LanguageModel
from lab.models.user_mixer import is_from_lab
from lab.training.gradients import StepResult, differentiate, differentiate_lanes
from lab.training.optimizers import step_together
from tasks.base import IGNORE, Batch, Task
from tasks.reader import BatchReader

if TYPE_CHECKING:
    from lab.training.stepper import Stepper


def record_gradients(
    models: Sequence[LanguageModel], batches: Sequence[Batch], precision: str
) -> Callable[[], list[StepResult]]:
    """Return a function that computes gradients as training does: a CUDA graph where it can be one.

    Args:
        models: one, or several as lanes; their weights stay as they are.
        batches: the rows of each.
        precision: "fp32" or "bf16".
    """

    def compute(per_row: int | None = None) -> list[StepResult]:
        return _differentiate(models, batches, precision, per_row)

    if batches[0].inputs.is_cuda:
        with contextlib.suppress(RuntimeError):
            for model in models:
                check_recordable(model)
            per_row = max(map(_count_positions, batches))
            return RecordedCall(lambda: compute(per_row), batches[0].inputs.device)
    return compute


def _differentiate(
    models: Sequence[LanguageModel], batches: Sequence[Batch], precision: str, per_row: int | None
) -> list[StepResult]:
    """Set the gradients of a model, or of lanes, anew."""
    for model in models:
        model.zero_grad(set_to_none=True)
    if len(models) > 1:
        return differentiate_lanes(models, batches, precision, per_row)
    return [differentiate(models[0], batches[0], precision, per_row=per_row)]


class RecordedStep:
    """The steps of a training at one stage, or of several as lanes.

    They are those without graphs, up to rounding.

    Hooks that are attached later are not called.

    Args:
        steppers: of the trainings, whose rows have one length. Each has taken a step already, so
            that its optimizers' state is there.
        precision: "fp32" or "bf16".

    Attributes:
        lanes: how many trainings there are.
        whole: whether no row had more scored positions than were recorded. If not, the gradients
            were computed once more, call by call.

    Raises:
        RuntimeError: for a model or a task whose gradients no CUDA graph can record.
    """

    whole: bool = True

    def __init__(self, steppers: Sequence["Stepper"], precision: str):
        self.lanes = len(steppers)
        self._models = [each.state.model for each in steppers]
        self._precision = precision
        for model in self._models:
            check_recordable(model)
        self._trained = [[p for p in m.parameters() if p.requires_grad] for m in self._models]
        self._clip_norms = [each.config.clip_norm for each in steppers]
        device = self._trained[0][0].device
        links = has_oracle_mask(self._models[0])
        self._rows = [
            _Rows(each.stage.task, each.stage.batch_size, each.config.seed, device, links=links)
            for each in steppers
        ]
        drawn = [self.draw(lane, each.first_row) for lane, each in enumerate(steppers)]
        self._per_row = max(map(_count_positions, drawn))
        self._differentiate = RecordedCall(self._compute, device)
        optimizers = [each.state.optimizers for each in steppers]
        _check_states(self._trained, optimizers)
        every = [each for of_lane in optimizers for each in of_lane.values()]
        self._groups = [group for each in every for group in each.param_groups]
        self._rates = torch.zeros(len(self._groups), device=device)
        with _read_rates(self._groups, self._rates.unbind()):
            self._update = RecordedCall(lambda: step_together(optimizers), device, rehearse=False)

    def draw(self, lane: int, start: int) -> Batch:
        """Return a lane's rows from a number on; the next ones replace them."""
        return self._rows[lane].draw(start)

    def differentiate(self) -> list[StepResult]:
        """Set the gradients of all lanes for the rows drawn, clipped."""
        found = self._differentiate().tolist()  # waits for the GPU, once for all
        self.whole = all(whole for *_, whole in found)
        if self.whole:
            return [
                StepResult(_keep(loss), _keep(correct), int(scored), _keep(norm))
                for loss, correct, scored, norm, _ in found
            ]
        return [self._differentiate_by_calls(lane) for lane in range(self.lanes)]

    def update(self) -> None:
        """Take the step of all lanes, each group of parameters at its own rate."""
        rates = torch.tensor([group["lr"] for group in self._groups])
        self._rates.copy_(rates, non_blocking=True)
        self._update()

    def _compute(self) -> Tensor:
        """Return of each lane the loss, correct and scored positions, norm and if all were seen."""
        batches = [rows.batch for rows in self._rows]
        outcomes = _differentiate(self._models, batches, self._precision, self._per_row)
        clipped = map(nn.utils.clip_grad_norm_, self._trained, self._clip_norms)
        whole = [((each.targets != IGNORE).sum(1) <= self._per_row).all() for each in batches]
        losses, correct, scored, _ = zip(*outcomes, strict=True)
        columns = losses, correct, scored, list(clipped), whole
        return torch.stack([torch.stack(list(each)).double() for each in columns], 1)

    def _differentiate_by_calls(self, lane: int) -> StepResult:
        for p in self._trained[lane]:
            if p.grad is not None:
                p.grad.zero_()  # the update reads these very tensors
        outcome = differentiate(self._models[lane], self._rows[lane].batch, self._precision)
        norm = nn.utils.clip_grad_norm_(self._trained[lane], self._clip_norms[lane])
        return outcome._replace(norm=norm)


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
        self._reader = BatchReader(task, size=size, seed=seed, device=device)
        self._offsets = torch.arange(size, device=device)
        self._numbers = self._offsets.clone()
        try:
            self._recorded = RecordedCall(self._generate, device)
            self.batch = self._recorded()
        except RuntimeError:
            self._recorded, self.batch = None, self._generate()

    def draw(self, start: int) -> Batch:
        """Return the rows from a number on."""
        if self._recorded is not None:
            torch.add(self._offsets, start, out=self._numbers)
            return self._recorded()
        drawn = self._reader.read(start)
        self.batch.inputs.copy_(drawn.inputs)
        self.batch.targets.copy_(drawn.targets)
        self.batch.roles.copy_(drawn.roles)
        for name, link in self.batch.links.items():
            link.copy_(drawn.links[name])
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
    mixers = [block.mixer for block in model.list_blocks()]
    if not all(mixer is None or is_from_lab(mixer) for mixer in mixers):
        raise RuntimeError("a mixer that is not the lab's may do more than torch can record")


def _check_states(
    trained: Sequence[Sequence[nn.Parameter]],
    optimizers: Sequence[Mapping[str, torch.optim.Optimizer]],
) -> None:
    """Check that optimizers have updated all that has gradients now.

    Raises:
        RuntimeError: for a parameter that would get its first update.
    """
    known = {p for of_lane in optimizers for each in of_lane.values() for p in each.state}
    if any(p.grad is not None and p not in known for of_lane in trained for p in of_lane):
        raise RuntimeError(
            "a parameter has its first gradient, so the optimizer has no state of it yet"
        )


def _keep(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


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

"""Training steps on a GPU as CUDA graphs: drawing rows, their gradients, and the update.

Small models leave a GPU waiting for Python between kernels. A graph has the GPU start them itself.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor, nn

from lab.config import TrainConfig
from lab.hooks import is_watched
from lab.layers.mask import has_oracle_mask
from lab.lengthening import Stage
from lab.models import LanguageModel
from lab.models.user_mixer import is_from_lab
from tasks.base import Batch, Task
from tasks.reader import BatchReader

if TYPE_CHECKING:
    from lab.training.loop import StepResult, TrainingState

T = TypeVar("T")
Differentiate = Callable[[LanguageModel, Batch, str, int | None], "StepResult"]
"""`lab.training.loop.differentiate`."""


class RecordedCall(Generic[T]):
    """A call whose kernels a GPU starts by itself, where Python starts them one after another.

    A replay does what the call did, on what the same tensors hold by then, and writes into the same
    results.

    Args:
        call: takes and returns tensors of one place and shape, whatever they hold.
        device: where they are.
        rehearse: whether to call it twice before: what it makes once is then there, and what would
            wait for the GPU shows. False for what changes its inputs.

    Raises:
        RuntimeError: for a call that waits for the GPU or copies to it, which no graph can record.
    """

    def __init__(self, call: Callable[[], T], device: torch.device, *, rehearse: bool = True):
        self._device = device
        current, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        aside.wait_stream(current)
        with torch.cuda.stream(aside):  # this also selects its device
            if rehearse:
                call()
                with _refuse_waiting():
                    call()
            self._graph = torch.cuda.CUDAGraph()
            aside.synchronize()
            torch.cuda.empty_cache()  # a graph has memory of its own
            self._graph.capture_begin()
            try:
                self.result = call()
            except BaseException:
                with suppress(RuntimeError):  # of the capture, which that has broken off
                    self._graph.capture_end()
                raise
            self._graph.capture_end()
        current.wait_stream(aside)

    def __call__(self) -> T:
        """Do it again, and return the results: the same tensors each time."""
        with torch.cuda.device(self._device):
            self._graph.replay()
        return self.result


@contextmanager
def _refuse_waiting() -> Iterator[None]:
    """Raise for what waits for the GPU, for a `with` block."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def record_gradients(
    differentiate: Differentiate, model: LanguageModel, batch: Batch, precision: str
) -> Callable[[], Tensor]:
    """Return a function that computes gradients as training does: a CUDA graph where it can be one.

    It returns the loss. The model's weights stay as they are.
    """

    def compute(per_row: int | None = None) -> Tensor:
        model.zero_grad(set_to_none=True)
        return differentiate(model, batch, precision, per_row).loss

    if batch.inputs.is_cuda:
        with contextlib.suppress(RuntimeError):
            check_recordable(model)
            per_row = _count_positions(batch)
            return RecordedCall(lambda: compute(per_row), batch.inputs.device)
    return compute


class RecordedStep:
    """The steps of a training at one stage; they are those without graphs, up to rounding.

    Hooks that are attached later are not called.

    Args:
        differentiate: computes the gradients of a step.
        state: of the training, which has taken a step at this stage already, so that its
            optimizers' state is there.
        stage: the stage.
        config: how to train.
        first: number of the next row.

    Attributes:
        whole: whether no row had more scored positions than were recorded. If not, the gradients
            were computed once more, call by call.

    Raises:
        RuntimeError: for a model or a task whose gradients no CUDA graph can record.
    """

    whole: bool = True

    def __init__(
        self,
        differentiate: Differentiate,
        state: "TrainingState",
        stage: Stage,
        config: TrainConfig,
        first: int,
    ):
        check_recordable(state.model)
        self._differentiate_by_calls = differentiate
        self._model, self._precision, self._clip_norm = (
            state.model,
            state.precision,
            config.clip_norm,
        )
        self._trained = [p for p in state.model.parameters() if p.requires_grad]
        device = self._trained[0].device
        links = has_oracle_mask(state.model)
        self._rows = _Rows(stage.task, stage.batch_size, config.seed, device, links=links)
        self._per_row = _count_positions(self._rows.draw(first))
        self._differentiate = RecordedCall(self._compute, device)
        optimizers = list(state.optimizers.values())
        _check_states(self._trained, optimizers)
        self._groups = [group for each in optimizers for group in each.param_groups]
        self._rates = torch.zeros(len(self._groups), device=device)

        def update() -> None:
            for each in optimizers:
                each.step()

        with _read_rates(self._groups, self._rates.unbind()):
            self._update = RecordedCall(update, device, rehearse=False)

    def differentiate(self, first: int) -> tuple[float, float, float, float]:
        """Set the gradients of the rows from a number on, clipped.

        Returns:
            loss, correct and scored positions, and the norm of the gradients before clipping.
        """
        batch = self._rows.draw(first)
        *found, whole = self._differentiate().tolist()  # waits for the GPU, once for all
        self.whole = bool(whole)
        if not self.whole:
            for p in self._trained:
                if p.grad is not None:
                    p.grad.zero_()  # the update reads these very tensors
            result = self._differentiate_by_calls(self._model, batch, self._precision, None)
            norm = nn.utils.clip_grad_norm_(self._trained, self._clip_norm)
            found = [number.item() for number in (*result, norm)]
        loss, correct, scored, norm = found
        return loss, correct, scored, norm

    def update(self) -> None:
        """Take the step, each group of parameters at its own rate."""
        rates = torch.tensor([group["lr"] for group in self._groups])
        self._rates.copy_(rates, non_blocking=True)
        self._update()

    def _compute(self) -> Tensor:
        """Return loss, correct and scored positions, norm, and whether all positions were seen."""
        batch = self._rows.batch
        self._model.zero_grad(set_to_none=True)
        result = self._differentiate_by_calls(self._model, batch, self._precision, self._per_row)
        norm = nn.utils.clip_grad_norm_(self._trained, self._clip_norm)
        whole = (batch.scored.sum(1) <= self._per_row).all()
        return torch.stack([number.double() for number in (*result, norm, whole)])


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
        """Return the rows from a number on; the next ones replace them."""
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


def can_record(device: torch.device) -> bool:
    """Whether a device has graphs."""
    return device.type == "cuda"


def check_recordable(model: LanguageModel) -> None:
    """Check that a model does nothing beside torch.

    Raises:
        RuntimeError: for one with hooks, or with a mixer that is not the lab's.
    """
    mixers = [block.mixer for block in model.list_blocks()]
    if not all(mixer is None or is_from_lab(mixer) for mixer in mixers):
        raise RuntimeError("a mixer that is not the lab's may do more than torch can record")
    if is_watched(model):
        raise RuntimeError("a hook is attached to the model")


def _check_states(
    trained: Sequence[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Check that optimizers have updated all that has gradients now.

    Raises:
        RuntimeError: for a parameter that would get its first update.
    """
    known = {p for each in optimizers for p in each.state}
    if any(p.grad is not None and p not in known for p in trained):
        raise RuntimeError(
            "a parameter has its first gradient, so the optimizer has no state of it yet"
        )


def _count_positions(batch: Batch) -> int:
    """Return the number of positions in each row at which a recorded step computes the loss.

    Where rows differ in how many are scored, other rows may have more, so all are taken.
    """
    fewest, most = batch.scored.sum(1).aminmax()
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

"""One run in several processes: each computes the gradient of its share of the rows of a step.

Process 0 leads. It alone has the run folder and the optimizers, evaluates, and decides how training
goes on. At each step it sends the others its weights and an order that says which rows are next.
Each process weights the gradient of its share so that all of them add up to the gradient of the
whole step, and process 0 takes the step. So weights cannot drift apart, and nobody has to agree on
anything: the others wait for the next order, which may be to end.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lab.hooks import hook_points, hooks
from lab.laws.seeding import fix_seed
from lab.layers.routed import SHARE_HOOK
from lab.lengthening import list_stages
from lab.machine.device import choose_device
from lab.machine.launch import Launch, LostProcessError, forget_launch
from lab.models import LanguageModel
from lab.training.gradients import StepResult, StepShare, differentiate
from lab.training.runs import Run
from lab.training.signals import catch_interrupts
from lab.training.state import TrainingState
from tasks.base import IGNORE, Batch

PATIENCE = timedelta(days=30)
"""How long a process waits for another one: an evaluation may take hours."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""The signals that end a run, in the order in which processes exchange how many of them arrived."""


@dataclass(frozen=True)
class Assignment:
    """What a process has to know before its first step.

    Attributes:
        run: what is trained.
        precision: "fp32" or "bf16".
        device: "cpu" or "cuda".
        threads: of the CPU.
    """

    run: Run
    precision: str
    device: str
    threads: int


class Order(NamedTuple):
    """Which rows the next step has, and what each process needs to compute its share.

    Attributes:
        stage: index among `lab.lengthening.list_stages`; `END`: there is no next step.
        first: number of its first row.
        seq_len: tokens of a row, without those after the last scored position.
        scored: positions that are scored in all of its rows.
        seed: of its random numbers.
    """

    stage: int
    first: int = 0
    seq_len: int = 0
    scored: int = 0
    seed: int = 0


END = -1


def check_shares(run: Run, launch: Launch, device: str) -> None:
    """Check that every process has rows to compute, and a GPU where one is used.

    Raises:
        ValueError: naming the option, its value and its bound.
    """
    rows = run.train.batch_size  # the smallest batch: shorter rows are more
    if rows < launch.count:
        raise ValueError(
            f"batch_size={rows}: must be ≥ {launch.count}, the number of processes, so that each "
            "has a row"
        )
    chosen = choose_device(device)
    if chosen.index is not None:
        raise ValueError(f"device={device}: must be cuda, as each process takes a GPU of its own")
    if chosen.type == "cuda" and torch.cuda.device_count() < launch.local_count:
        raise ValueError(
            f"device={device}: this machine has {torch.cuda.device_count()} GPUs for "
            f"{launch.local_count} processes; start fewer, or use --device cpu"
        )


def find_share(rows: int, launch: Launch) -> slice:
    """Return which rows of a step a process computes: shares differ by one row at most.

    >>> [find_share(8, Launch(rank, 3, rank, 3)) for rank in range(3)]
    [slice(0, 2, None), slice(2, 5, None), slice(5, 8, None)]
    """
    return slice(rows * launch.rank // launch.count, rows * (launch.rank + 1) // launch.count)


class Leader:
    """Process 0 of a run, once the others have their assignments.

    Args:
        launch: its place.
        state: of the training that it leads.

    Attributes:
        interrupt: the signal that another process got, if one did.
    """

    def __init__(self, launch: Launch, state: TrainingState):
        self.interrupt: signal.Signals | None = None
        self._launch, self._state = launch, state

    def differentiate(self, batch: Batch, stage: int, first: int) -> StepResult:
        """Set the gradients of a step, of which this process computes a share.

        Args:
            batch: all rows of the step.
            stage: index of the current stage.
            first: number of the first row.

        Raises:
            LostProcessError: when another process has ended; the weights are as before.
        """
        scored = int((batch.targets != IGNORE).sum())
        order = Order(stage, first, batch.inputs.shape[1], scored, torch.initial_seed())
        model, precision = self._state.model, self._state.precision
        _share_order(order)
        _share_weights(model)
        rows = len(batch.inputs)
        outcome = _compute(model, batch[find_share(rows, self._launch)], rows, order, precision)
        loss, correct, *caught = _add_up(model, outcome, order)
        self.interrupt = next((n for n, count in zip(SIGNALS, caught, strict=True) if count), None)
        return StepResult(loss, correct, scored)


@contextmanager
def lead(launch: Launch, run: Run, state: TrainingState) -> Iterator[Leader]:
    """Have the other processes help to train a run, for a `with` block; at its end they end.

    Args:
        launch: the place of this process, which is 0.
        run: what is trained.
        state: of its training.

    Raises:
        LostProcessError: when another process has ended.
    """
    device = next(state.model.parameters()).device.type
    assignment = Assignment(run, state.precision, device, state.threads)
    with _join():
        _share_assignment(assignment)
        try:
            yield Leader(launch, state)
        finally:
            with suppress(LostProcessError):
                _share_order(Order(END))


def dismiss() -> None:
    """Let the other processes end, as there is nothing to train."""
    with _join():
        _share_assignment(None)


def follow(launch: Launch) -> None:
    """Compute shares of the gradients of a run that process 0 leads, until it has ended.

    SIGINT and SIGTERM end the run after the current step, as if process 0 had got them.

    Raises:
        LostProcessError: when process 0 has ended without a word.
        RunError: when the model cannot be built here.
    """
    for number in SIGNALS:  # a process that waits for process 0 runs no handler
        signal.signal(number, signal.SIG_DFL)
    with _join(), catch_interrupts() as find_interrupt:
        assignment = _share_assignment(None)
        if assignment is None:
            return
        device = torch.device(assignment.device)
        if device.type == "cuda":
            device = torch.device("cuda", launch.local_rank)
            torch.cuda.set_device(device)
        torch.set_num_threads(assignment.threads)
        run, model = assignment.run, assignment.run.build().to(device)
        stages = list_stages(run.task, run.train)
        while (order := _share_order(None)).stage != END:
            stage = stages[order.stage]
            share = find_share(stage.batch_size, launch)
            batch = stage.task.batch(
                start=order.first + share.start,
                size=share.stop - share.start,
                seed=run.train.seed,
                device=device,
            ).take(slice(None), order.seq_len)
            model.zero_grad(set_to_none=True)
            _share_weights(model)
            # A seed for each process, or dropout would drop the same places of every share.
            with fix_seed((order.seed + (launch.rank << 32)) % 2**63, device):
                outcome = _compute(model, batch, stage.batch_size, order, assignment.precision)
            _add_up(model, outcome, order, find_interrupt())


@contextmanager
def _join() -> Iterator[None]:
    """Connect the processes, for a `with` block; each does so once."""
    forget_launch()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _name_loss() -> Iterator[None]:
    """Say what it means that processes cannot exchange tensors any more."""
    try:
        yield
    except RuntimeError as error:
        raise LostProcessError(
            "another process of this run has ended, or cannot be reached; the same command goes "
            "on from the newest checkpoint"
        ) from error


def _share_assignment(assignment: Assignment | None) -> Assignment | None:
    """Send what the other processes need to know, or receive it."""
    box = [assignment]
    with _name_loss():
        dist.broadcast_object_list(box, 0)
    return box[0]


def _share_order(order: Order | None) -> Order:
    """Send an order to the other processes, or receive one."""
    numbers = torch.tensor(order or Order(END), dtype=torch.int64)
    with _name_loss():
        dist.broadcast(numbers, 0)
    return Order(*numbers.tolist())


@torch.no_grad()
def _share_weights(model: LanguageModel) -> None:
    """Send the weights to the other processes, or take those received."""
    tensors = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    with _name_loss():
        dist.broadcast(flat, 0)
    if dist.get_rank() != 0:
        sizes = [tensor.numel() for tensor in tensors]
        for tensor, values in zip(tensors, flat.split(sizes), strict=True):
            tensor.copy_(values.view_as(tensor))


def _compute(
    model: LanguageModel, batch: Batch, rows: int, order: Order, precision: str
) -> StepResult:
    """Set the gradients of this process's share, weighted so that all add up to the step's."""
    scored = int((batch.targets != IGNORE).sum())
    part = StepShare(len(batch.inputs) / rows, scored / order.scored)

    def average(share: Tensor, _: object) -> Tensor:
        total = part.rows * share
        with _name_loss():
            dist.all_reduce(total)
        return total

    # A balance loss is a product of two means, so each share needs one of them of all rows.
    names = [name for name in hook_points(model) if name.split(".")[-1] == SHARE_HOOK]
    with hooks(model, [(names, average)]):
        return differentiate(model, batch, precision, part)


def _add_up(
    model: LanguageModel, outcome: StepResult, order: Order, caught: signal.Signals | None = None
) -> Tensor:
    """Add up what the processes have found: in process 0, the gradients become those of the step.

    Returns:
        In process 0: the loss, how many answers are right, and how many other processes have got
        each of `SIGNALS`, float64 [4].
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    loss = outcome.scored / order.scored * outcome.loss.item()
    signals = [caught == number for number in SIGNALS]
    known = [weight.grad is not None for weight in weights]
    numbers = torch.tensor([loss, outcome.correct.item(), *signals, *known], dtype=torch.float64)
    grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
    flat = torch.cat([grad.flatten() for grad in grads])
    with _name_loss():
        dist.reduce(numbers, 0)
        dist.reduce(flat, 0)
    found, known = numbers.split([numbers.numel() - len(weights), len(weights)])
    if dist.get_rank() == 0:
        parts = flat.split([weight.numel() for weight in weights])
        for weight, grad, count in zip(weights, parts, known.tolist(), strict=True):
            # A weight that no process uses keeps no gradient: its optimizer leaves it alone.
            weight.grad = grad.view_as(weight).to(weight.dtype) if count else None
    return found

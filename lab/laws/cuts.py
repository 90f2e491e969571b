"""Where a parameter's gradient is cut: the operation, and its line in the module's source."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from lab.laws.probes import draw

TO_PYTHON = {
    *("item", "tolist", "numpy", "__array__", "__bool__"),
    *("__int__", "__float__", "__index__", "__complex__"),
}
"""Methods that hand a tensor's numbers to Python, where no gradient follows."""
POINTERS = {"data_ptr", "untyped_storage", "storage", "__dlpack__"}
"""Methods that hand a tensor to a kernel which torch does not see."""
PRODUCTS = {
    *("mul", "mul_", "multiply", "__mul__", "__rmul__", "matmul", "__matmul__", "__rmatmul__"),
    *("mm", "bmm", "mv", "dot", "linear", "einsum", "tensordot", "outer", "addmm", "baddbmm"),
    *("lerp", "div", "conv1d", "conv2d"),
}
CHECKPOINT = "torch.utils.checkpoint"
"""The guard whose insides run once more, seen by autograd: what cuts there is not told."""
NOT_THE_MODULE = ("torch", "lab.laws.adapters", "jaxtyping", "beartype")
"""Packages whose lines are not the module's: also those that check types around others."""


def cuts(module: nn.Module, x: Tensor, none: Iterable[str], zero: Iterable[str]) -> dict[str, str]:
    """Return the words for what cuts parameters off the output, where a trace tells.

    Args:
        module: as it is; it runs once forward, and back for each of zero.
        x: the input.
        none: names of parameters that no path leads to.
        zero: names of those to which one does, and carries nothing.
    """
    parameters = dict(module.named_parameters())
    trace, found = Trace(id(sys._getframe())), {}
    try:
        with trace:
            y = module(x)
        for name in none:
            found[name] = _cut(trace.operations, parameters[name], x, y)
        for name in zero:
            found[name] = _lost(trace.operations, parameters[name], y)
    except Exception:
        # Whatever a foreign module does under a trace: the law has judged it already.
        return found
    return found


@dataclass(frozen=True)
class Operation:
    """One call of a torch function.

    Attributes:
        name: as in source.
        place: file and line, or empty where none of the module's led to it.
        guard: what kept autograd from looking, or empty.
        inputs: tensors among the arguments.
        numbers: plain numbers among the arguments.
        outputs: tensors returned or written.
    """

    name: str
    place: str
    guard: str
    inputs: list[Tensor]
    numbers: list[int | float]
    outputs: list[Tensor]

    @property
    def method(self) -> str:
        """The name's last part."""
        return self.name.rpartition(".")[2]


class Trace(TorchFunctionMode):
    """Notes every call of a torch function, and keeps its tensors so that no id comes twice.

    Args:
        caller: the id of the frame that runs the module, where the module's own lines end.
    """

    def __init__(self, caller: int):
        super().__init__()
        self.operations: list[Operation] = []
        self.caller = caller

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call the function and note it."""
        watched, frames = torch.is_grad_enabled(), list(calls(sys._getframe(1), self.caller))
        returned = func(*args, **(kwargs or {}))
        flat = list(_flattened((args, kwargs or {})))
        inputs = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        if inputs:
            name = _name(func)
            outputs = [leaf for leaf in _flattened(returned) if isinstance(leaf, Tensor)]
            if name == "Tensor.__setitem__":
                outputs = inputs[:1]
            numbers = [leaf for leaf in flat if type(leaf) in (int, float)]
            guard = "" if watched else _guard(frames)
            place = place_of(frames)
            self.operations.append(Operation(name, place, guard, inputs, numbers, outputs))
        return returned


def calls(frame: FrameType | None, caller: int) -> Iterator[FrameType]:
    """Yield a frame and its callers, up to the one of that id and without it."""
    while frame is not None and id(frame) != caller:
        yield frame
        frame = frame.f_back


def place_of(frames: Iterable[FrameType]) -> str:
    """Return the file and line of the innermost frame of the module, or ""."""
    others = tuple(f"{name}." for name in NOT_THE_MODULE)
    for frame in frames:
        generated = frame.f_code.co_filename.startswith("<@")
        if not generated and not _package_of(frame).startswith(others):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return ""


def _package_of(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '')}."


def _guard(frames: list[FrameType]) -> str:
    """Return what autograd does not look into, where it does not look."""
    for frame in frames:
        if _package_of(frame) == "torch.utils.checkpoint.":
            return CHECKPOINT
        if _package_of(frame) == "torch.autograd.function." and frame.f_code.co_name == "apply":
            return f"{frame.f_locals['cls'].__name__}, an autograd.Function,"
    return "no_grad"


def _name(func: Any) -> str:
    """Return what a torch function is called in source."""
    name = resolve_name(func) or str(getattr(func, "__name__", func))
    name = name.removesuffix(".__get__").replace("torch.nn.functional.", "F.")
    return name.removeprefix("torch.") if name.startswith("torch.Tensor.") else name


def _cut(operations: list[Operation], parameter: Tensor, x: Tensor, y: Tensor) -> str:
    """Name the first operation on the way to the output behind which nothing leads back."""
    carries, reaches = _carrying(operations, parameter), _before(operations, y)
    ends = [o for o in operations if _among(o.inputs, carries)]
    by = next((o for o in ends if any(id(t) in reaches - carries for t in o.outputs)), None)
    taken = [o for o in operations if any(t is parameter for t in o.inputs)]
    taken = [o for o in taken if o.outputs or o.method in TO_PYTHON | POINTERS]
    if by is None:
        if _has_hole(operations, reaches, x, y) or any(o.method in POINTERS for o in taken):
            return ""
        by = next((o for o in ends if o.method in TO_PYTHON), None)
    if by is not None:
        return "" if by.guard == CHECKPOINT else f"cut by {_described(by)}"
    if not taken:
        return "never used"
    return f"used{_at(taken[0])}, but its result does not reach the output"


def _lost(operations: list[Operation], parameter: Tensor, y: Tensor) -> str:
    """Name the first operation whose output gets a gradient, and its inputs on the way none."""
    carries = _carrying(operations, parameter, through_functions=True)
    seen = [parameter, *(t for o in operations for t in o.outputs if id(t) in carries)]
    tensors = {id(t): t for t in seen if t.requires_grad}
    weighted = (y * draw(y.shape, seed=1).to(y)).sum()
    grads = torch.autograd.grad(
        weighted, list(tensors.values()), retain_graph=True, allow_unused=True
    )
    got = {i: grad for i, grad in zip(tensors, grads, strict=True) if grad is not None}
    sizes = {id(t): _size(got.get(id(t))) for t in seen}
    eps = torch.finfo(y.dtype).eps
    for o in operations:
        coming = max((sizes[id(t)] for t in o.outputs if id(t) in carries), default=0.0)
        arriving = [t for t in o.inputs if id(t) in carries]
        leaving = max((sizes[id(t)] for t in arriving), default=coming)
        if leaving <= 64 * eps * coming and coming > 0:
            if o.guard == CHECKPOINT:
                return ""
            others = [t for t in o.inputs if id(t) not in carries]
            zero = 0 in o.numbers or any(t.numel() and not t.any() for t in others)
            if zero and o.method in PRODUCTS:
                return f"multiplied by zero in {_described(o)}"
            parts = [o for o in operations if _hands_on(o, arriving[0], got)]
            names = list(dict.fromkeys(o.name for o in parts[:-1] if o.name != parts[-1].name))
            if names:
                return f"lost between {', '.join(names)} and {_described(parts[-1])}"
            return f"lost in {_described(o)}"
    return ""


def _hands_on(o: Operation, to: Tensor, got: dict[int, Tensor]) -> bool:
    """Whether an operation has a gradient that it could hand on to an input."""
    return any(t is to for t in o.inputs) and any(_size(got.get(id(t))) > 0 for t in o.outputs)


def _carrying(
    operations: list[Operation], parameter: Tensor, through_functions: bool = False
) -> set[int]:
    """Return the ids of tensors through which autograd leads back to the parameter.

    Args:
        operations: all of them, in order.
        parameter: which.
        through_functions: also of those inside custom functions, which autograd does not see.
    """
    carries = {id(parameter)}
    for o in operations:
        if _among(o.inputs, carries):
            inside = through_functions and o.guard not in ("", "no_grad")
            carries |= {id(t) for t in o.outputs if t.requires_grad or inside}
    return carries


def _before(operations: list[Operation], y: Tensor) -> set[int]:
    """Return the ids of tensors that the output was computed from, and its own."""
    reaches = {id(y)}
    for o in reversed(operations):
        if _among(o.outputs, reaches):
            reaches |= {id(t) for t in o.inputs}
    return reaches


def _has_hole(operations: list[Operation], reaches: set[int], x: Tensor, y: Tensor) -> bool:
    """Whether something that the output came from came from nowhere that was seen."""
    seen = {id(t) for o in operations for t in o.outputs} | {id(x)}
    came = [y, *(t for o in operations for t in o.inputs if id(t) in reaches)]
    return any(t.grad_fn is not None and id(t) not in seen for t in came)


def _among(tensors: list[Tensor], ids: set[int]) -> bool:
    return any(id(t) in ids for t in tensors)


def _size(grad: Tensor | None) -> float:
    return 0.0 if grad is None or not grad.numel() else grad.abs().max().item()


def _described(o: Operation) -> str:
    return f"{o.guard} around {o.name}{_at(o)}" if o.guard else f"{o.name}{_at(o)}"


def _at(o: Operation) -> str:
    return f" at {o.place}" if o.place else ""


def _flattened(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested tuples, lists and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from _flattened(part)
    else:
        yield value

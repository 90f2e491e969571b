"""Where gradients end inside a module, and why."""

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
from lab.seeding import fix_seed

CHECKPOINT = "torch.utils.checkpoint"
"""The guard of a checkpoint, whose inside runs again under autograd: no cut there is reported."""
NOT_THE_MODULE = ("torch", "lab.laws.adapters", "lab.laws.tokens", "jaxtyping", "beartype")
"""Packages whose lines are not the module's own, e.g. those that check types around calls."""


@dataclass(frozen=True)
class Operation:
    """One call of a torch function.

    Attributes:
        name: its name as written in source.
        place: file and line of the module that led to it, or empty if none did.
        guard: what hid the call from autograd, or empty.
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
    """Records every call of a torch function, and keeps its tensors so that ids stay unique.

    Args:
        caller: id of the frame that calls the module; frames above it are not the module's.
    """

    def __init__(self, caller: int):
        super().__init__()
        self.operations: list[Operation] = []
        self.caller = caller

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call the function and record it."""
        visible, frames = torch.is_grad_enabled(), list(list_callers(sys._getframe(1), self.caller))
        returned = func(*args, **(kwargs or {}))
        flat = list(_flatten((args, kwargs or {})))
        inputs = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        if inputs:
            name = _name_function(func)
            outputs = [leaf for leaf in _flatten(returned) if isinstance(leaf, Tensor)]
            if name == "Tensor.__setitem__":
                outputs = inputs[:1]
            numbers = [leaf for leaf in flat if type(leaf) in (int, float)]
            guard = "" if visible else _find_guard(frames)
            place = find_place(frames)
            self.operations.append(Operation(name, place, guard, inputs, numbers, outputs))
        return returned


def list_callers(frame: FrameType | None, caller: int) -> Iterator[FrameType]:
    """Yield a frame and its callers, up to but without the one with that id."""
    while frame is not None and id(frame) != caller:
        yield frame
        frame = frame.f_back


def find_place(frames: Iterable[FrameType]) -> str:
    """Return file and line of the innermost frame in the module's own code, or ""."""
    others = tuple(f"{name}." for name in NOT_THE_MODULE)
    for frame in frames:
        generated = frame.f_code.co_filename.startswith("<@")
        if not generated and not _get_package(frame).startswith(others):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return ""


def _get_package(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '')}."


def _find_guard(frames: list[FrameType]) -> str:
    """Return what hides a call from autograd: a checkpoint, a custom function or no_grad."""
    for frame in frames:
        if _get_package(frame) == "torch.utils.checkpoint.":
            return CHECKPOINT
        if _get_package(frame) == "torch.autograd.function." and frame.f_code.co_name == "apply":
            return f"{frame.f_locals['cls'].__name__}, an autograd.Function,"
    return "no_grad"


def _name_function(func: Any) -> str:
    """Return the name of a torch function as written in source."""
    name = resolve_name(func) or str(getattr(func, "__name__", func))
    name = name.removesuffix(".__get__").replace("torch.nn.functional.", "F.")
    return name.removeprefix("torch.") if name.startswith("torch.Tensor.") else name


def _flatten(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested tuples, lists and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from _flatten(part)
    else:
        yield value


TO_PYTHON = {
    *("item", "tolist", "numpy", "__array__", "__bool__"),
    *("__int__", "__float__", "__index__", "__complex__"),
}
"""Methods that turn a tensor into Python numbers, which carry no gradient."""
POINTERS = {"data_ptr", "untyped_storage", "storage", "__dlpack__"}
"""Methods that hand a tensor to a kernel that torch cannot see."""
PRODUCTS = {
    *("mul", "mul_", "multiply", "__mul__", "__rmul__", "matmul", "__matmul__", "__rmatmul__"),
    *("mm", "bmm", "mv", "dot", "linear", "einsum", "tensordot", "outer", "addmm", "baddbmm"),
    *("lerp", "div", "conv1d", "conv2d"),
}

UNREACHED = ", but its result does not reach the output"
UNSEEN = " and moves the output, but a trace does not show where its gradient is cut"


def explain_cuts(
    module: nn.Module, x: Tensor, none: Iterable[str], zero: Iterable[str]
) -> dict[str, str]:
    """Say what cuts parameters off the output, for those where a trace shows it.

    Args:
        module: as it is; it runs forward once, backward once for each parameter of `zero`, and
            forward once more for each of `none` whose path to the output the trace does not show.
        x: the input.
        none: names of parameters that autograd finds no path to.
        zero: names of parameters whose gradient is zero.
    """
    parameters, before = dict(module.named_parameters()), x.detach().clone()
    trace, found = Trace(id(sys._getframe())), {}
    try:
        with fix_seed(0, x.device), trace:
            y = module(x)
        for name in none:
            words = _explain_missing(trace.operations, parameters[name], x, y)
            if words.endswith(UNREACHED) and _moves(module, parameters[name], before, y):
                words = words.removesuffix(UNREACHED) + UNSEEN
            found[name] = words
        for name in zero:
            found[name] = _explain_zero(trace.operations, parameters[name], y)
    except Exception:
        # A foreign module may do anything under a trace; the law has judged it already.
        return found
    return found


def _explain_missing(operations: list[Operation], parameter: Tensor, x: Tensor, y: Tensor) -> str:
    """Name the first operation towards the output after which no path leads back."""
    carries, reaches = _find_carriers(operations, parameter), _find_sources(operations, y)
    ends = [o for o in operations if _contains_any(o.inputs, carries)]
    by = next((o for o in ends if any(id(t) in reaches - carries for t in o.outputs)), None)
    taken = list(list_uses(operations, parameter))
    if by is None:
        if _has_hole(operations, reaches, x, y) or any(o.method in POINTERS for o in taken):
            return ""
        by = next((o for o in ends if o.method in TO_PYTHON), None)
    if by is not None:
        return "" if by.guard == CHECKPOINT else f"cut by {_describe(by)}"
    if not taken:
        return "never used"
    return f"used{_describe_place(taken[0])}{UNREACHED}"


def list_uses(operations: list[Operation], parameter: Tensor) -> Iterator[Operation]:
    """Yield the operations that compute with a parameter, beyond asking for its shape."""
    for o in operations:
        computes = o.outputs or o.method in TO_PYTHON | POINTERS
        if computes and any(t is parameter for t in o.inputs):
            yield o


@torch.no_grad()
def _moves(module: nn.Module, parameter: Tensor, x: Tensor, y: Tensor) -> bool:
    """Whether changing the parameter changes the output y of x."""
    was = parameter.clone()
    try:
        parameter.add_(draw(was.shape, seed=1).to(was))
        with fix_seed(0, x.device):
            return not torch.equal(module(x), y)
    finally:
        parameter.copy_(was)


def _explain_zero(operations: list[Operation], parameter: Tensor, y: Tensor) -> str:
    """Name the first operation whose output gets a gradient while its inputs get none."""
    carries = _find_carriers(operations, parameter, through_functions=True)
    seen = [parameter, *(t for o in operations for t in o.outputs if id(t) in carries)]
    tensors = {id(t): t for t in seen if t.requires_grad}
    weighted = (y * draw(y.shape, seed=1).to(y)).sum()
    grads = torch.autograd.grad(
        weighted, list(tensors.values()), retain_graph=True, allow_unused=True
    )
    got = {i: grad for i, grad in zip(tensors, grads, strict=True) if grad is not None}
    sizes = {id(t): _get_size(got.get(id(t))) for t in seen}
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
                return f"multiplied by zero in {_describe(o)}"
            parts = [o for o in operations if _could_pass_on(o, arriving[0], got)]
            names = list(dict.fromkeys(o.name for o in parts[:-1] if o.name != parts[-1].name))
            if names:
                return f"lost between {', '.join(names)} and {_describe(parts[-1])}"
            return f"lost in {_describe(o)}"
    return ""


def _could_pass_on(o: Operation, to: Tensor, got: dict[int, Tensor]) -> bool:
    """Whether an operation has a gradient to pass on to an input."""
    return any(t is to for t in o.inputs) and any(_get_size(got.get(id(t))) > 0 for t in o.outputs)


def _find_carriers(
    operations: list[Operation], parameter: Tensor, through_functions: bool = False
) -> set[int]:
    """Return the ids of tensors from which autograd leads back to the parameter.

    Args:
        operations: all of them, in order.
        parameter: where the paths end.
        through_functions: whether to follow paths inside custom functions, hidden from autograd.
    """
    carries = {id(parameter)}
    for o in operations:
        if _contains_any(o.inputs, carries):
            inside = through_functions and o.guard not in ("", "no_grad")
            # What a custom function returns requires a gradient, but not along this operation.
            visible = o.guard in ("", CHECKPOINT)
            carries |= {id(t) for t in o.outputs if (visible and t.requires_grad) or inside}
    return carries


def _find_sources(operations: list[Operation], y: Tensor) -> set[int]:
    """Return the ids of the output and of all tensors that it was computed from."""
    reaches = {id(y)}
    for o in reversed(operations):
        if _contains_any(o.outputs, reaches):
            reaches |= {id(t) for t in o.inputs}
    return reaches


def _has_hole(operations: list[Operation], reaches: set[int], x: Tensor, y: Tensor) -> bool:
    """Whether the output depends on a tensor whose own origin the trace does not show."""
    seen = {id(t) for o in operations for t in o.outputs} | {id(x)}
    came = [y, *(t for o in operations for t in o.inputs if id(t) in reaches)]
    return any(t.grad_fn is not None and id(t) not in seen for t in came)


def _contains_any(tensors: list[Tensor], ids: set[int]) -> bool:
    return any(id(t) in ids for t in tensors)


def _get_size(grad: Tensor | None) -> float:
    return 0.0 if grad is None or not grad.numel() else grad.abs().max().item()


def _describe(o: Operation) -> str:
    return (
        f"{o.guard} around {o.name}{_describe_place(o)}"
        if o.guard
        else f"{o.name}{_describe_place(o)}"
    )


def _describe_place(o: Operation) -> str:
    return f" at {o.place}" if o.place else ""


RANKING = {
    "topk": (2, -1),
    "kthvalue": (2, -1),
    "sort": (1, -1),
    "argsort": (1, -1),
    "argmax": (1, None),
    "argmin": (1, None),
    "max": (1, None),
    "min": (1, None),
    "median": (1, None),
}
"""Functions that return indices of entries by size: position of the axis argument, and its default
value."""


class Ties(TorchFunctionMode):
    """Permutes the entries that every ranking function sees.

    The indices are mapped back, so only the choice among equal entries changes.

    Args:
        order: 0 for the reverse order, otherwise the seed of a permutation.
        caller: id of the frame that calls the module; frames above it are not the module's.

    Attributes:
        places: the functions that ranked equal entries, with their lines.
    """

    def __init__(self, order: int, caller: int = 0):
        super().__init__()
        self.order, self.caller = order, caller
        self.places: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Rank in another order, or call another function as it is."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        plain = func(*args, **kwargs)
        indices = _get_indices(name, plain) if name in RANKING and args else None
        if indices is None or not args[0].ndim or "out" in kwargs:
            return plain
        position, dim = RANKING[name]
        dim = args[position] if len(args) > position else kwargs.get("dim", dim)
        x = args[0] if dim is not None else args[0].flatten()
        order = self._draw_order(x.shape[-1 if dim is None else dim], x.device)
        permuted = x.index_select(-1 if dim is None else dim, order)
        other = func(permuted.view(args[0].shape) if dim is None else permuted, *args[1:], **kwargs)
        found = _get_indices(name, other)
        assert found is not None
        found = order[found]
        if not torch.equal(found, indices):
            place = find_place(list_callers(sys._getframe(1), self.caller))
            words = f"{name} at {place}" if place else name
            self.places += [words] if words not in self.places else []
        return found if isinstance(other, Tensor) else type(plain)((other[0], found))

    def _draw_order(self, n: int, device: torch.device) -> Tensor:
        if not self.order:
            return torch.arange(n - 1, -1, -1, device=device)
        generator = torch.Generator().manual_seed(self.order)
        return torch.randperm(n, generator=generator).to(device)


def _get_indices(name: str, answer: Any) -> Tensor | None:
    """Return the indices in an answer; None if it has none, e.g. the maximum of all entries."""
    if isinstance(answer, tuple):
        return answer[1]
    return answer if name.startswith("arg") else None

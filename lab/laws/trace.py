"""A trace of a module's torch operations, with the lines of its source that made them."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

CHECKPOINT = "torch.utils.checkpoint"
"""The guard of a checkpoint, whose inside runs again under autograd: no cut there is reported."""
NOT_THE_MODULE = ("torch", "lab.laws.adapters", "jaxtyping", "beartype")
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

"""Finding out how a foreign module is called."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from lab.laws.adapters.kinds import is_hugging_face
from lab.laws.adapters.reading import Adapted, Asked, like, reading_tokens, reading_vectors
from lab.laws.adapters.sizes import vocabularies
from lab.laws.probes import draw
from lab.laws.refusal import REFUSALS, RefusalError, raised

READINGS = {"hidden": reading_vectors, "tokens": reading_tokens}
LAYOUTS = ("btd", "tbd", "bdt")


def adapt(
    target: nn.Module | Callable[..., Any],
    *,
    input: str | None = None,
    d_model: int | None = None,
    vocab_size: int | None = None,
    layout: str | None = None,
    output: str | int | None = None,
    relative: bool | None = None,
) -> Adapted:
    """Find out by probing how a module is called, and make it one from [b t d] to [b t e].

    It is probed on a copy, evaluating, and comes out as it went in. One that reads tokens is held
    as a copy: it has a hook on its embedding table (`lab.laws.adapters.tokens`).

    Args:
        target: a module, or a function.
        input: what it reads, "hidden" [b t d] or "tokens" [b t]; None tries both.
        d_model: width d; None tries those that the module names, and those of its weights.
        vocab_size: of one that reads tokens; None looks for it.
        layout: of its axes, "btd", "tbd" or "bdt"; None goes by `batch_first`, then tries.
        output: which item of a tuple or field of an object is the sequence; None takes the first.
        relative: whether the module claims that only differences of positions count; None goes by
            what is recognised.

    Raises:
        ValueError: for an option that is not among its values; for a module that takes no sequence
            or gives none back: says what was tried, and which option may help.
    """
    if input not in (None, *READINGS):
        raise ValueError(f"{input=} must be one of {', '.join(READINGS)}")
    if layout not in (None, *LAYOUTS):
        raise ValueError(f"{layout=} must be one of {', '.join(LAYOUTS)}")
    for name, size in (("d_model", d_model), ("vocab_size", vocab_size)):
        if size is not None and size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    asked = Asked(d_model, vocab_size, layout, output, relative)
    tried = deepcopy(target)
    if isinstance(tried, nn.Module):
        tried.eval()
    refused = []
    for way in _ways(target, vocab_size) if input is None else (input,):
        try:
            return READINGS[way](target, tried, asked)
        except RefusalError as refusal:
            refused.append(f"{way}: {refusal}")
    name = type(target).__name__ if isinstance(target, nn.Module) else _name(target)
    raise ValueError(f"{name} is not understood: {'; '.join(refused)}")


@torch.no_grad()
def accepted(
    module: nn.Module, d_model: int, lengths: tuple[int, ...], batch: int
) -> tuple[tuple[int, ...], dict[int, str]]:
    """Return the lengths that a module from [b t d] takes, and the error for each that it refuses.

    Args:
        module: in its mode.
        d_model: width d of the inputs.
        lengths: to try.
        batch: rows b to try with.
    """
    taken, refused = [], {}
    for length in lengths:
        try:
            y = module(like(module, draw((batch, length, d_model), length)))
            if y.shape[:2] != (batch, length):
                raise RefusalError(f"returned {list(y.shape)}")
        except REFUSALS as error:
            refused[length] = raised(error)
        else:
            taken.append(length)
    return tuple(taken), refused


def _ways(target: Any, vocab_size: int | None) -> tuple[str, ...]:
    """Return what a module may read, the likelier first."""
    if vocab_size is not None or is_hugging_face(target):
        return ("tokens",)
    return ("hidden", "tokens") if vocabularies(target) else ("hidden",)


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)

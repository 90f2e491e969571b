"""Finding out how a foreign module is called."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from lab.laws.adapters.kinds import is_hugging_face
from lab.laws.adapters.options import AdapterOptions
from lab.laws.adapters.reading import Adapted, adapt_tokens, adapt_vectors, match_module
from lab.laws.adapters.sizes import list_vocabularies
from lab.laws.probes import draw
from lab.laws.refusal import RefusalError, describe_refusal

READERS = {"hidden": adapt_vectors, "tokens": adapt_tokens}


def adapt(target: nn.Module | Callable[..., Any], **options: Any) -> Adapted:
    """Find out by trying how a module is called, and make it one from [b t d] to [b t e].

    A copy is tried, in evaluation mode; the target is not changed. A module that reads tokens is
    held as a copy, with a hook on its embedding table (`lab.laws.adapters.tokens`).

    Args:
        target: a module, or a function.
        options: fields of `AdapterOptions`.

    Raises:
        ValueError: as `AdapterOptions`; for a module that takes or returns no sequence: says what
            was tried, and which option may help.
    """
    known = AdapterOptions(**options)
    tried = deepcopy(target)
    if isinstance(tried, nn.Module):
        tried.eval()
    refusals = []
    for way in (known.input,) if known.input else _list_inputs(target, known.vocab_size):
        try:
            return READERS[way](target, tried, known)
        except RefusalError as refusal:
            refusals.append(f"with {way} inputs, {refusal}")
    name = type(target).__name__ if isinstance(target, nn.Module) else _get_name(target)
    raise ValueError(f"found no way to call {name}: {'; '.join(refusals)}")


@torch.no_grad()
def find_lengths_taken(
    module: nn.Module, d_model: int, lengths: tuple[int, ...], batch: int
) -> tuple[tuple[int, ...], dict[int, str]]:
    """Return the lengths that a module from [b t d] takes, and the error for each other length.

    Args:
        module: in the mode to try.
        d_model: width d of the inputs.
        lengths: to try.
        batch: rows b to try with.
    """
    taken, refused = [], {}
    for length in lengths:
        try:
            y = module(match_module(module, draw((batch, length, d_model), length)))
            if y.shape[:2] != (batch, length):
                raise RefusalError(f"returned {list(y.shape)}")
        except Exception as error:
            refused[length] = describe_refusal(error)
        else:
            taken.append(length)
    return tuple(taken), refused


def _list_inputs(target: Any, vocab_size: int | None) -> tuple[str, ...]:
    """Return what a module may read, the likelier first."""
    if vocab_size is not None or is_hugging_face(target):
        return ("tokens",)
    return ("hidden", "tokens") if list_vocabularies(target) else ("hidden",)


def _get_name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)

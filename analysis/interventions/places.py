"""Look up where an intervention acts (model, block, mixer, indices), and check the bounds."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from lab.hooks import unwrap
from lab.models import Block, LanguageModel

Indices = Tensor | np.ndarray | Sequence[int]
"""A list of integers ≥ 0."""


def get_language_model(model: nn.Module) -> LanguageModel:
    """Return the language model, unwrapped if it is compiled.

    Raises:
        ValueError: for anything but a `LanguageModel`.
    """
    inner = unwrap(model)
    if not isinstance(inner, LanguageModel):
        raise ValueError(f"model is {type(inner).__name__}, must be LanguageModel")
    return inner


def get_block(model: nn.Module, layer: int) -> Block:
    """Return a block.

    Raises:
        ValueError: for a layer that the model does not have.
    """
    blocks = get_language_model(model).blocks
    if not 0 <= layer < len(blocks):
        raise ValueError(f"{layer=} must be in 0 … {len(blocks) - 1}: the model's blocks")
    block = unwrap(blocks[layer])
    assert isinstance(block, Block)
    return block


def get_mixer(model: nn.Module, layer: int) -> nn.Module:
    """Return a block's sequence mixer.

    Raises:
        ValueError: for a layer that the model does not have, or one without a mixer.
    """
    mixer = get_block(model, layer).mixer
    if mixer is None:
        raise ValueError(f"{layer=} has no mixer")
    return unwrap(mixer)


def to_indices(field: str, given: Indices) -> Int[Tensor, " n"]:
    """Return a list of indices as a tensor.

    Raises:
        ValueError: for numbers that are not integers, another shape, or integers below 0.
    """
    found = torch.as_tensor(given)
    if found.numel() == 0:
        found = found.long()
    integral = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
    if found.ndim != 1 or not integral:
        raise ValueError(f"{field} is {found.dtype} {list(found.shape)}, must be integers [n]")
    if found.numel() and found.min() < 0:
        raise ValueError(f"{field} holds {int(found.min())}, must be at least 0")
    return found.long().cpu()


def check_below(field: str, found: Int[Tensor, " n"], size: int, what: str) -> None:
    """Check that indices are below a size.

    Raises:
        ValueError: for an index that is not.
    """
    if found.numel() and found.max() >= size:
        raise ValueError(f"{field} holds {int(found.max())}, must be below {size}, the {what}")


def check_lengths(**fields: Int[Tensor, " _"]) -> None:
    """Check that lists which belong together have one length.

    Raises:
        ValueError: for lists of different lengths.
    """
    lengths = {name: len(found) for name, found in fields.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{length} {name}" for name, length in lengths.items())
        raise ValueError(f"{counts}: must be equally many")

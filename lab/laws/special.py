"""Inputs that modules may treat apart: vectors of zeros, and the tokens of padding and of ends."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lab.laws.adapters.tokens import Tokens, encode_token

Special = Mapping[str, int] | None
"""The arguments of `encode_token` beside the width; None for a vector of zeros."""
NAMED = ("pad_token_id", "eos_token_id", "bos_token_id", "pad_id", "eos_id", "bos_id")


def list_special(module: nn.Module) -> list[Special]:
    """List what a module might take for padding or for an end.

    A module that reads vectors: zeros. One that reads tokens: the first two, the last, and those
    that it or its configuration names. An embedding's `padding_idx` is never read.
    """
    reader = next((part for part in module.modules() if isinstance(part, Tokens)), None)
    if reader is None:
        return [None]
    owners: list[Any] = list(reader.modules())
    owners = [*owners, *(getattr(part, "config", None) for part in owners)]
    named = {getattr(owner, name, None) for owner in owners for name in NAMED}
    size, skip = reader.vocab_size, -1 if reader.skip is None else reader.skip
    ids = sorted({0, 1, size - 1, *(n for n in named if type(n) is int and 0 <= n < size)} - {skip})
    return [{"token": token, "vocab_size": size, "skip": skip} for token in ids]


def put_special(x: Tensor, special: Special, places: slice) -> Tensor:
    """Return x [b t d] with a special input at some places."""
    x = x.clone()
    vector = 0.0 if special is None else encode_token(x.shape[-1], **special).to(x)
    x[:, places] = vector
    return x


@torch.no_grad()
def compare_special(
    module: Any, x: Tensor, s: int, end: int, special: Special
) -> tuple[Tensor, Tensor]:
    """Return how the outputs before position s move when the inputs from s to the end change."""
    y = module(x)
    changed = put_special(x, special, slice(s, end))
    return module(changed)[:, :s] - y[:, :s], y


@torch.no_grad()
def compare_beside_special(
    module: Any, x: Tensor, s: int, special: Special
) -> tuple[Tensor, Tensor]:
    """Return how the first row moves when the others end in a special input from s on."""
    y = module(x)
    changed = put_special(x, special, slice(s, None))
    changed[0] = x[0]
    return (module(changed) - y)[:1], y


def name_special(special: Special) -> str:
    """Name a special input."""
    return "zeros" if special is None else f"token {special['token']}"

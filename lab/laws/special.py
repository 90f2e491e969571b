"""Inputs that modules may treat specially: vectors of zeros, and tokens of padding and of ends."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lab.laws.adapters.tokens import Tokens, encode_token, encode_tokens
from lab.laws.timing import read_clock

Special = Mapping[str, int] | None
"""The arguments of `encode_token` beside the width; None for a vector of zeros."""
NAMED = re.compile(r"(^|_)(pad|eos|bos|sep|separator|cls|mask|unk|eot)(_|$)|token_id$")
"""Names of attributes that hold a token with a meaning of its own."""
MOST_NAMED = 8
NUMBERS = 2**22
"""Numbers that a model may return at once while its vocabulary is searched."""


def list_special(module: nn.Module) -> list[Special]:
    """List what a module might take for padding or for an end.

    A module that reads vectors: zeros. One that reads tokens: the first two, the last, and those
    that it or its configuration names. An embedding's `padding_idx` is never read.
    """
    reader = next((part for part in module.modules() if isinstance(part, Tokens)), None)
    if reader is None:
        return [None]
    owners: list[Any] = list(reader.modules())
    owners += [config for part in owners if (config := getattr(part, "config", None)) is not None]
    named = dict.fromkeys(token for owner in owners for token in _list_named(owner))
    size, skip = reader.vocab_size, -1 if reader.skip is None else reader.skip
    first = [token for token in named if 0 <= token < size][:MOST_NAMED]
    ids = sorted({0, 1, size - 1, *first} - {skip})
    return [{"token": token, "vocab_size": size, "skip": skip} for token in ids]


def _list_named(owner: Any) -> Iterator[int]:
    """Yield the tokens that the attributes of an object or of its class name."""
    for name in {**getattr(owner, "__dict__", {}), **vars(type(owner))}:
        token = getattr(owner, name, None) if NAMED.search(name) else None
        if type(token) is int:
            yield token


@torch.no_grad()
def find_token_suspect(module: nn.Module, x: Tensor, seconds: float) -> Special:
    """Return the token that moves earlier outputs most, where it is last; None if none does.

    Args:
        module: a module that reads tokens.
        x: the input, of which the first row is taken [b t d].
        seconds: time for the search, which takes tokens from both ends of the vocabulary in turns.
    """
    reader = next((part for part in module.modules() if isinstance(part, Tokens)), None)
    if reader is None:
        return None
    size, skip = reader.vocab_size, -1 if reader.skip is None else reader.skip
    tokens = torch.arange(size)
    tokens = torch.stack([tokens, tokens.flip(0)], 1).flatten()[:size]
    y, began = module(x[:1])[:, :-1], read_clock()
    most, suspect = 0.0, None
    for some in tokens[tokens != skip].split(max(1, NUMBERS // (x.shape[1] * y[0, 0].numel()))):
        if read_clock() - began > seconds:
            break
        rows = x[:1].repeat(len(some), 1, 1)
        rows[:, -1] = encode_tokens(x.shape[-1], some, size, skip).to(x)
        moved = (module(rows)[:, :-1] - y).flatten(1).abs().amax(1).nan_to_num(torch.inf)
        if moved.max() > most:
            most, token = moved.max().item(), int(some[moved.argmax()])
            suspect = {"token": token, "vocab_size": size, "skip": skip}
    return suspect


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

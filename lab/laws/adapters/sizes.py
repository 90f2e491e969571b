"""The sizes that a module may need: the width of its inputs, its vocabulary."""

from collections.abc import Iterator
from typing import Any

from torch import nn

WIDTHS = (
    "d_model",
    "hidden_size",
    "embed_dim",
    "embedding_dim",
    "n_embd",
    "dim",
    "input_size",
    "in_features",
    "in_channels",
    "input_dim",
    "d_in",
    "channels",
    "width",
)
VOCABULARIES = ("vocab_size", "n_vocab", "num_tokens", "num_embeddings", "vocab")
ANY_WIDTH = (16, 64)
"""Widths for a module without weights, which takes any."""
MOST = 24
"""Widths to try at most; the layers of a module have a few."""


def list_widths(target: Any) -> list[int]:
    """List the widths that a module's inputs may have, the likeliest first.

    First the widths that it or its configuration names; then those of its submodules, in order:
    in_features, normalized_shape, and the last and the second axes of their weights.
    """
    found = [
        *_find_sizes(target, WIDTHS),
        *(w for part in _list_parts(target) for w in _list_widths_read(part)),
    ]
    return [*dict.fromkeys(width for width in (*found, *ANY_WIDTH) if width > 0)][:MOST]


def list_vocabularies(target: Any) -> list[int]:
    """List the sizes that a module's vocabulary may have: those it names, and its tables'."""
    tables = (part for part in _list_parts(target) if isinstance(part, nn.Embedding))
    return [*_find_sizes(target, VOCABULARIES), *(table.num_embeddings for table in tables)]


def choose_vocabulary(target: Any, table: nn.Embedding | None) -> int:
    """Return the size of the vocabulary, as the module names it or as its table has rows.

    Args:
        target: the module.
        table: its embedding table, which may have spare rows; None if it was not found.
    """
    if table is None:
        return list_vocabularies(target)[0]
    return min([table.num_embeddings, *list(_find_sizes(target, VOCABULARIES))[:1]])


def _find_sizes(target: Any, names: tuple[str, ...]) -> Iterator[int]:
    """Yield positive integers among the attributes of a module or its configuration."""
    config = getattr(target, "config", None)
    for owner in (target, config, getattr(target, "args", None), getattr(target, "cfg", None)):
        for name in names:
            size = owner.get(name) if isinstance(owner, dict) else getattr(owner, name, None)
            if isinstance(size, int) and not isinstance(size, bool) and size > 0:
                yield size


def _list_parts(target: Any) -> Iterator[nn.Module]:
    """Yield a module and its submodules, or those of the module that a method is bound to."""
    owner = target if isinstance(target, nn.Module) else getattr(target, "__self__", None)
    if isinstance(owner, nn.Module):
        yield from owner.modules()


def _list_widths_read(part: nn.Module) -> Iterator[int]:
    yield from _find_sizes(part, WIDTHS)
    shape = getattr(part, "normalized_shape", ())
    yield from shape[-1:] if isinstance(shape, tuple) else ()
    for weight in part.parameters(recurse=False):
        yield from weight.shape[-1:]
        yield from weight.shape[1:2]

"""The sizes that a module may want: of its inputs' width, of its vocabulary."""

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
ANY_WIDTH = (16, 64)  # for what has no weights, and takes any
MOST = 24  # widths to try: a module's layers have a few


def widths(target: Any) -> list[int]:
    """Return the widths that a module's inputs may have, the likeliest first.

    Those it names, or its configuration does; then those that its parts read, in their order: their
    in_features and normalized_shape, and the last and the second axes of their weights.
    """
    found = [*_named(target, WIDTHS), *(w for part in _parts(target) for w in _read_by(part))]
    return [*dict.fromkeys([*found, *ANY_WIDTH])][:MOST]


def vocabularies(target: Any) -> list[int]:
    """Return the sizes that a module's vocabulary may have: those it names, and its tables'."""
    tables = (part for part in _parts(target) if isinstance(part, nn.Embedding))
    return [*_named(target, VOCABULARIES), *(table.num_embeddings for table in tables)]


def vocabulary(target: Any, table: nn.Embedding | None) -> int:
    """Return how many tokens there are: as many as the module says, or its table has rows.

    Args:
        target: the module.
        table: its embedding table, which may have rows to spare; None if it was not found.
    """
    if table is None:
        return vocabularies(target)[0]
    return min([table.num_embeddings, *list(_named(target, VOCABULARIES))[:1]])


def _named(target: Any, names: tuple[str, ...]) -> Iterator[int]:
    """Yield the whole numbers that a module or its configuration has under names."""
    config = getattr(target, "config", None)
    for owner in (target, config, getattr(target, "args", None), getattr(target, "cfg", None)):
        for name in names:
            size = owner.get(name) if isinstance(owner, dict) else getattr(owner, name, None)
            if isinstance(size, int) and not isinstance(size, bool) and size > 0:
                yield size


def _parts(target: Any) -> Iterator[nn.Module]:
    """Yield a module and all within it, or those that a function is bound to."""
    owner = target if isinstance(target, nn.Module) else getattr(target, "__self__", None)
    if isinstance(owner, nn.Module):
        yield from owner.modules()


def _read_by(part: nn.Module) -> Iterator[int]:
    yield from _named(part, WIDTHS)
    shape = getattr(part, "normalized_shape", ())
    yield from shape[-1:] if isinstance(shape, tuple) else ()
    for weight in part.parameters(recurse=False):
        yield from weight.shape[-1:]
        yield from weight.shape[1:2]

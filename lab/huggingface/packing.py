"""Packed rows: several documents one after another in a row, each read as if it stood alone."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")
PACKING = ("position_ids", "seq_idx", *LENGTHS)
"""Arguments that say where documents begin, as transformers' collators and kernels name them."""


class Documents(NamedTuple):
    """Where each token of packed rows stands: in which document, and where in it.

    The documents are read as a batch of rows, the shorter ones filled up on the right: a causal
    model never reads what follows, so every mixer begins each anew, and counts its positions from
    0. That takes as much time and memory as (documents) × (the longest) tokens.
    """

    document: Int[Tensor, "b t"]
    place: Int[Tensor, "b t"]

    def unpack(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "document place d"]:
        """Return the documents as rows of one batch, zeros behind the shorter ones."""
        shape = [int(part.max()) + 1 for part in self]
        return x.new_zeros(*shape, x.shape[-1]).index_put(tuple(self), x)

    def pack(self, x: Float[Tensor, "document place *axes"]) -> Float[Tensor, "b t *axes"]:
        """Return the documents' tokens where they stood."""
        return x[self.document, self.place]


def find_documents(
    given: Mapping[str, Tensor], shape: tuple[int, int], keep: Bool[Tensor, "b t"] | None
) -> Documents:
    """Return the documents of packed rows.

    Args:
        given: arguments of `PACKING`: `position_ids` [b t] start again at 0, `seq_idx` [b t]
            changes, `cu_seqlens` [n + 1] lists where each begins and the last ends, in one row.
        shape: [b, t] of the tokens.
        keep: False at padding, which stands between documents and not within.

    Raises:
        ValueError: for an argument of another shape, lengths that do not cover a single row,
            positions that do not count from 0, or two arguments that name different documents.
    """
    found: dict[str, Tensor] = {}
    for name, value in given.items():
        if name in LENGTHS:
            found[name] = _read_lengths(name, value, shape)
            continue
        if value.ndim != 2 or value.shape[1] != shape[1] or value.shape[0] not in (1, shape[0]):
            raise ValueError(f"{name} is {list(value.shape)}, must be {list(shape)}")
        steps = value.expand(shape).diff(dim=1) != (1 if name == "position_ids" else 0)
        found[name] = torch.cat([steps.new_ones(shape[0], 1), steps], 1)
        if keep is not None:
            found[name][:, 1:] |= keep.diff(dim=1)
    first, *others = found
    starts = found[first]
    for other in others:
        if not torch.equal(found[other], starts):
            raise ValueError(f"{first} and {other} name different documents")
    positions = given.get("position_ids")
    if positions is not None:
        begun = positions.expand(shape)[starts if keep is None else starts & keep]
        if begun.any():
            raise ValueError(
                f"position_ids: must count from 0 in each document, one begins at {begun.max()}"
            )
    document = starts.flatten().cumsum(0).view(shape) - 1
    places = torch.arange(shape[1], device=starts.device).expand(shape)
    return Documents(document, places - torch.where(starts, places, 0).cummax(1).values)


def _read_lengths(name: str, ends: Tensor, shape: tuple[int, int]) -> Bool[Tensor, "b t"]:
    if shape[0] != 1 or ends.ndim != 1:
        raise ValueError(f"{name} is {list(ends.shape)}, must be [n + 1] beside one row of tokens")
    if not (len(ends) > 1 and ends[0] == 0 and ends[-1] == shape[1] and (ends.diff() > 0).all()):
        raise ValueError(f"{name}={ends.tolist()}: must rise from 0 to {shape[1]}, the tokens")
    starts = torch.zeros(shape, dtype=torch.bool, device=ends.device)
    starts[0, ends[:-1].long()] = True
    return starts

"""Interventions on a mixer's matrix: its entries, and the values that it mixes.

Every mixer with a matrix is y = project(x, M @ values), so the same edit works for all, exactly.
In attention and IFA, M is the pattern after softmax and mask. In an SSD, M̃ includes decay, dt and
the skip D on its diagonal, and `project` includes the gate. `project` includes the output map.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from analysis.interventions.by_matrix import Edit, apply_by_matrix
from analysis.interventions.edges import BlockedEdges
from analysis.interventions.places import Indices, check_below, check_lengths, to_indices


@contextmanager
def edit_matrix(model: nn.Module, layer: int, edit: Edit) -> Iterator[nn.Module]:
    """Edit the matrix that a mixer applies: y = project(x, edit(matrix(x), rows) @ values(x)).

    >>> from lab.models import build
    >>> model, tokens = build("AM*2", vocab_size=8, d_model=16), torch.arange(8)[None]
    >>> with edit_matrix(model, 1, lambda matrix, rows: matrix.triu(-2)):  # at most two tokens back
    ...     logits = model(tokens)

    Args:
        model: a language model.
        layer: index of the block.
        edit: gets M [b h t s] of some rows of the batch, and which rows they are, int64 [b].
            Returns the matrix to apply, without changing M in place. Its rows are not normalised
            again. Each call gets as many rows as memory allows; it gets the whole batch where a
            hook is on the mixer, and the hook may then run more than once a pass.

    Raises:
        ValueError: for a layer that the model does not have, or one without a matrix. While it
            runs: for a result of another shape, a mixer whose matrix is not what it applies,
            decoding, and hooks on an SSD's writes and states, which an edited matrix lacks.
    """
    with apply_by_matrix(model, layer) as edited:
        edited.edits.append(edit)
        try:
            yield model
        finally:
            edited.edits.pop()


@contextmanager
def block_edges(
    model: nn.Module,
    layer: int,
    targets: Indices,
    sources: Indices,
    *,
    rows: Indices | None = None,
    heads: Indices | None = None,
) -> Iterator[nn.Module]:
    """Keep target i from reading source j, for n edges (i, j): M_ij = 0.

    In attention, IFA and any other `SoftmaxMixer` the edge's score is −∞ before the softmax, so the
    other edges of the row share its mass; a row without any edge left mixes nothing: zeros. In an
    SSD, M̃_ij = 0 is exactly the recurrence whose read at i lacks what was written at j; other
    reads keep it. An edge (i, i) of an SSD includes its skip. Rows are not normalised again.

    Args:
        model: a language model.
        layer: index of the block.
        targets: i [n].
        sources: j [n], at most i.
        rows: of the batch [n], one per edge; None: each edge in all rows.
        heads: of the matrix; None: all.

    Raises:
        ValueError: for an index out of bounds, lists of different lengths, a source after its
            target, and as `edit_matrix`.
    """
    edges = BlockedEdges.of(targets, sources, rows, heads)

    def close(matrix: Tensor, batch: Tensor) -> Tensor:
        return matrix.masked_fill(edges.mark(batch, tuple(matrix.shape)), 0.0)

    with apply_by_matrix(model, layer) as edited:
        edited.checks.append(edges.check)
        edited.blocked.append(edges)
        edited.edits.append(close)
        try:
            yield model
        finally:
            edited.checks.pop()
            edited.blocked.pop()
            edited.edits.pop()


@contextmanager
def swap_values(
    model: nn.Module, layer: int, first: Indices, second: Indices
) -> Iterator[nn.Module]:
    """Exchange the values of two positions that a mixer reads, one pair of positions per row.

    Their columns of M apply to each other's values, in all heads. M stays as it was, so attention
    and a dynamic mask, which depends on values, do not follow the swap. An SSD's skip does, because
    it is part of M̃.

    Args:
        model: a language model.
        layer: index of the block.
        first: one position of each row [b].
        second: the other one; two equal positions change nothing.

    Raises:
        ValueError: for an index out of bounds, lists of another length than the batch, and as
            `edit_matrix`.
    """
    one, other = to_indices("first", first), to_indices("second", second)
    check_lengths(first=one, second=other)

    def swap(values: Tensor, batch: Tensor) -> Tensor:
        b, h, s, p = values.shape
        order = torch.arange(s, device=values.device).repeat(b, 1)
        a, z = (w.to(values.device)[batch][:, None] for w in (one, other))
        order = order.scatter(1, a, z).scatter(1, z, a)
        return values.gather(2, order[:, None, :, None].expand(b, h, s, p))

    def check(x: Tensor) -> None:
        if len(one) != len(x):
            raise ValueError(f"first and second have {len(one)} rows, must be the batch's {len(x)}")
        for field, positions in (("first", one), ("second", other)):
            check_below(field, positions, x.shape[1], "sequence length")

    with apply_by_matrix(model, layer) as edited:
        edited.swaps.append(swap)
        edited.checks.append(check)
        try:
            yield model
        finally:
            edited.swaps.pop()
            edited.checks.pop()

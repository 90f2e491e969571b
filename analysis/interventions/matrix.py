"""Interventions on a mixer's matrix: its entries, and the values that it mixes.

Every mixer with a matrix is y = project(x, M @ values), so the same edit works for all, exactly.
In attention and IFA, M is the pattern after softmax and mask. In an SSD, M̃ includes decay, dt and
the skip D on its diagonal, and `project` includes the gate. `project` includes the output map.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from analysis.interventions.points import (
    Indices,
    check_below,
    check_lengths,
    get_mixer,
    to_indices,
)
from analysis.mixing import BLOCK_ENTRIES
from lab.compilation import keep_eager
from lab.hooks import HookPoint
from lab.layers.mask import has_oracle_mask
from lab.layers.mixer import MatrixMixer, Mixer
from lab.layers.state import Decoder
from lab.models.user_mixer import convert_errors, is_from_lab

Edit = Callable[[Tensor, Tensor], Tensor]
"""Gets a matrix [b h t s] and which rows of the batch it is of [b]; returns the one to apply."""


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
    with _apply_by_matrix(model, layer, _Change(matrix=edit)):
        yield model


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

    In attention, IFA and any other mixer with a `scores_hook` the edge's score is −∞ before the
    softmax, so the other edges of the row share its mass; a row without any edge left mixes
    nothing: zeros. In an SSD, M̃_ij = 0 is exactly the recurrence whose read at i lacks what was
    written at j; other reads keep it. An edge (i, i) of an SSD includes its skip. Rows are not
    normalised again.

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
    at, of = to_indices("targets", targets), to_indices("sources", sources)
    check_lengths(targets=at, sources=of)
    for target, source in zip(at.tolist(), of.tolist(), strict=True):
        if source > target:
            raise ValueError(f"source {source} is after its target {target}: no token reads ahead")
    in_rows = None if rows is None else to_indices("rows", rows)
    in_heads = None if heads is None else to_indices("heads", heads)
    if in_rows is not None:
        check_lengths(targets=at, rows=in_rows)

    def check(x: Tensor) -> None:
        check_below("targets", at, x.shape[1], "sequence length")
        if in_rows is not None:
            check_below("rows", in_rows, x.shape[0], "rows of the batch")

    def mark(matrix: Tensor, batch: Tensor) -> Tensor:
        """Return whether each entry of some rows' matrices is blocked [b h t s]."""
        b, h, t, s = matrix.shape
        edges = torch.zeros(b, t, s, dtype=torch.bool)
        if in_rows is None:
            edges[:, at, of] = True
        else:
            row, edge = (batch.cpu()[:, None] == in_rows).nonzero(as_tuple=True)
            edges[row, at[edge], of[edge]] = True
        chosen = torch.ones(h, dtype=torch.bool)
        if in_heads is not None:
            check_below("heads", in_heads, h, "heads of the matrix")
            chosen = torch.zeros(h, dtype=torch.bool).index_fill(0, in_heads, True)
        return edges.to(matrix.device)[:, None] & chosen.to(matrix.device)[:, None, None]

    def close(matrix: Tensor, batch: Tensor) -> Tensor:
        return matrix.masked_fill(mark(matrix, batch), 0.0)

    with _apply_by_matrix(model, layer, _Change(matrix=close, check=check, blocked=mark)):
        yield model


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

    with _apply_by_matrix(model, layer, _Change(values=swap, check=check)):
        yield model


@dataclass(frozen=True)
class _Change:
    """What an intervention changes of y = project(x, M @ values).

    Attributes:
        matrix: edits M.
        values: edits the values [b h s p].
        check: checks the input, before anything is computed.
        blocked: marks entries whose scores a softmax must not see.
    """

    matrix: Edit | None = None
    values: Edit | None = None
    check: Callable[[Tensor], None] | None = None
    blocked: Edit | None = None


class _MatrixForward:
    """Replaces a mixer's forward by y = project(x, M @ values), with changes to M and values.

    Attributes:
        changes: in the order in which they act.
        verified: whether the matrix is known to be the one that the mixer applies.
        verifying: whether the mixer's own forward is running, to find that out.
    """

    def __init__(self, mixer: Mixer):
        assert isinstance(mixer, MatrixMixer)
        self.mixer = mixer
        self.changes: list[_Change] = []
        self.verified = is_from_lab(mixer)
        self.verifying = False

    def __call__(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        return self._apply(x)

    # Code compiled for the other forward has no use for a graph of this one.
    @keep_eager
    def _apply(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        mixer = self.mixer
        for change in self.changes:
            if change.check is not None:
                change.check(x)
        recurrent = mixer.recurrent_hooks
        if any(self._get_point(name).active for name in recurrent):
            raise ValueError(
                f"{' and '.join(recurrent)}: no hook may be on them while a matrix is edited; "
                "an edited matrix has no recurrent state"
            )
        if not self.verified:
            convert_errors(self._verify, type(mixer))(x[:1])
            self.verified = True
        parts = torch.arange(len(x), device=x.device).split(self._count_rows_at_once(x))
        return mixer.project(x, torch.cat([self._mix(x[rows], rows) for rows in parts]))

    def _get_point(self, name: str) -> HookPoint:
        point = getattr(self.mixer, name)
        assert isinstance(point, HookPoint)
        return point

    def _count_rows_at_once(self, x: Float[Tensor, "b t d"]) -> int:
        """Return how many rows of the batch are mixed at once: all, where something needs all."""
        mixer = self.mixer
        watched = any(isinstance(m, HookPoint) and m.active for m in mixer.modules())
        if watched or has_oracle_mask(mixer):
            return len(x)
        one = mixer.matrix(x[:1], rows=slice(0, 1)) if mixer.takes_rows else mixer.matrix(x[:1])
        return max(1, BLOCK_ENTRIES // (one.shape[1] * x.shape[1] ** 2))

    def _mix(self, x: Float[Tensor, "b t d"], rows: Int[Tensor, " b"]) -> Float[Tensor, "b h t p"]:
        blocked = [change.blocked for change in self.changes if change.blocked is not None]

        def close(scores: Tensor, point: HookPoint) -> Tensor:
            closed = scores
            for mark in blocked:
                closed = closed.masked_fill(mark(scores, rows), -torch.inf)
            # A row without any edge left keeps its scores: the matrix is zeroed after the softmax.
            empty = (closed == -torch.inf).all(-1, keepdim=True)
            return torch.where(empty, scores, closed)

        with ExitStack() as stack:
            if self.mixer.scores_hook is not None and blocked:
                stack.callback(self._get_point(self.mixer.scores_hook).add_hook(close))
            matrix = self.mixer.matrix(x)
        values = self.mixer.values(x)
        for change in self.changes:
            if change.matrix is not None:
                shape, matrix = matrix.shape, change.matrix(matrix, rows)
                if not isinstance(matrix, Tensor) or matrix.shape != shape:
                    tensor = isinstance(matrix, Tensor)
                    got = list(matrix.shape) if tensor else type(matrix).__name__
                    raise ValueError(f"edit returned {got}, must be {list(shape)} as it was given")
            if change.values is not None:
                values = change.values(values, rows)
        return matrix @ values

    def _verify(self, x: Float[Tensor, "1 t d"]) -> None:
        """Refuse a mixer that does not apply the matrix it returns: an edit would mean nothing."""
        with torch.no_grad():
            self.verifying = True
            try:
                y = type(self.mixer).forward(self.mixer, x)
            finally:
                self.verifying = False
            applied = self.mixer.project(x, self.mixer.matrix(x) @ self.mixer.values(x))
            off = ((applied - y).norm() / y.norm().clamp(min=torch.finfo(y.dtype).tiny)).item()
        eps = torch.finfo(y.dtype).eps
        if self.mixer.computed_in is not None:
            eps = max(eps, torch.finfo(self.mixer.computed_in).eps)
        if not off <= eps**0.5:
            raise ValueError(
                f"project(x, matrix(x) @ values(x)) is off forward(x) by {off:.2g} of its norm"
            )


@contextmanager
def _apply_by_matrix(model: nn.Module, layer: int, change: _Change) -> Iterator[None]:
    """Apply a block's mixer by its matrix, with a change; it cannot decode meanwhile.

    Nested calls share one `_MatrixForward`.
    """
    mixer = get_mixer(model, layer)
    name = type(mixer).__name__
    if not isinstance(mixer, MatrixMixer):
        raise ValueError(f"{layer=}: {name} has no matrix, values and project to edit")
    with ExitStack() as stack:
        edited = vars(mixer).get("forward")
        if not isinstance(edited, _MatrixForward):
            edited = _MatrixForward(mixer)
            replacements: dict[str, Any] = {"forward": edited, "takes_positions": False}
            if isinstance(mixer, Decoder):
                for method in ("prefill", "step"):
                    replacements[method] = _refuse(edited, getattr(mixer, method))
            for method, replacement in replacements.items():
                stack.callback(_restore, mixer, method, vars(mixer).get(method))
                setattr(mixer, method, replacement)
        edited.changes.append(change)
        stack.callback(edited.changes.pop)
        yield


def _refuse(edited: _MatrixForward, method: Callable) -> Callable:
    """Return a decoding method that raises, unless the mixer's own forward calls it."""

    def decode(*args: Any, **options: Any) -> Any:
        if edited.verifying:
            return method(*args, **options)
        name = type(edited.mixer).__name__
        raise ValueError(f"{name} cannot decode while its matrix is edited: run it whole")

    return decode


def _restore(mixer: nn.Module, method: str, before: Callable | None) -> None:
    """Undo a method's replacement: back to the class's method, or what the mixer itself had."""
    delattr(mixer, method)
    if before is not None:
        setattr(mixer, method, before)

"""Interventions on what a mixer applies: entries of its matrix, and the values that it mixes.

Every mixer of the lab is y = project(x, M @ values), so all are changed alike, and exactly. What
each part holds: attention's and IFA's M is the pattern, softmax and mask included; SSD's M̃ holds
decay, dt, and the skip D on its diagonal, and `project` its gate; all `project` by the output map.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from analysis.interventions.places import Indices, check_below, check_lengths, get_mixer, to_indices
from analysis.mixing import BLOCK_ENTRIES
from lab.compilation import keep_eager
from lab.hooks import HookPoint
from lab.laws import MatrixMixer
from lab.layers.attention import Attention
from lab.layers.inner_function import InnerFunctionAttention
from lab.layers.mask import OracleMask
from lab.layers.ssd import SSD
from lab.layers.state import Decoder
from lab.models.user_mixer import convert_errors

Edit = Callable[[Tensor, Tensor], Tensor]
"""Gets a matrix [b h t s] and the rows of the batch that it is of [b]; returns one to apply."""


@contextmanager
def edit_matrix(model: nn.Module, layer: int, edit: Edit) -> Iterator[nn.Module]:
    """Let a mixer apply another matrix: y = project(x, edit(matrix(x), rows) @ values(x)).

    >>> with edit_matrix(model, 1, lambda matrix, rows: matrix.triu(-8)):  # doctest: +SKIP
    ...     loss = scored(model, batch).losses.mean()  # nothing further back than 8 tokens

    Args:
        model: a language model.
        layer: index of the block.
        edit: gets M [b h t s] of some rows of the batch, and which rows they are, int64 [b];
            returns what to apply in its place, and leaves M itself as it is. M is as
            `matrix(x)` has it: not normalised anew. A batch is handled by as many rows at once as
            memory allows, and whole where a hook looks into the mixer, which it then may do more
            than once a pass.

    Raises:
        ValueError: for a layer that the model has not, or one without a matrix. While it runs: for
            a result of another shape, a mixer whose matrix is not what it applies, decoding, and
            hooks on an SSD's writes and states, which an edited matrix has not.
    """
    with _by_matrix(model, layer) as edited:
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
    """Let target i not read source j, for n edges (i, j): M_ij = 0.

    In attention and IFA the edge's score is −∞ before the softmax, so that the other edges of the
    row share its mass; a row that is left with no edge mixes nothing: zeros. In an SSD M̃_ij = 0
    is exactly the recurrence whose read at i lacks what was written at j; other reads keep it. An
    edge (i, i) of an SSD is its skip too. Other mixers' rows are not normalised anew.

    Args:
        model: a language model.
        layer: index of the block.
        targets: i [n].
        sources: j [n], at most i.
        rows: of the batch [n], one an edge; None: each edge in all rows.
        heads: of the matrix; None: all.

    Raises:
        ValueError: for what is out of bounds, lists of different lengths, a source after its
            target, and as `edit_matrix`.
    """
    edges = _Edges.of(targets, sources, rows, heads)

    def close(matrix: Tensor, batch: Tensor) -> Tensor:
        return matrix.masked_fill(edges.marks(batch, tuple(matrix.shape)), 0.0)

    with _by_matrix(model, layer) as edited:
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
    """Exchange what two positions hold for a mixer to read, a pair of positions a row.

    Their columns of M apply to each other's values, in all heads. M stays as it was: who reads
    which position, and a dynamic mask, which looks at the values, do not follow. An SSD's skip
    does, as it is part of M̃.

    Args:
        model: a language model.
        layer: index of the block.
        first: a position for each row [b].
        second: the other; the same position exchanges nothing.

    Raises:
        ValueError: for what is out of bounds, lists of another length than the batch, and as
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

    with _by_matrix(model, layer) as edited:
        edited.swaps.append(swap)
        edited.checks.append(check)
        try:
            yield model
        finally:
            edited.swaps.pop()
            edited.checks.pop()


@dataclass(frozen=True)
class _Edges:
    """Entries of matrices [b h t s].

    Attributes:
        targets: t of each.
        sources: s of each.
        rows: b of each; None: all.
        heads: of all of them; None: all.
    """

    targets: Int[Tensor, " n"]
    sources: Int[Tensor, " n"]
    rows: Int[Tensor, " n"] | None
    heads: Int[Tensor, " m"] | None

    @classmethod
    def of(
        cls, targets: Indices, sources: Indices, rows: Indices | None, heads: Indices | None
    ) -> "_Edges":
        found = cls(
            to_indices("targets", targets),
            to_indices("sources", sources),
            None if rows is None else to_indices("rows", rows),
            None if heads is None else to_indices("heads", heads),
        )
        check_lengths(targets=found.targets, sources=found.sources)
        if found.rows is not None:
            check_lengths(targets=found.targets, rows=found.rows)
        late = (found.sources > found.targets).nonzero()[:, 0]
        if len(late):
            source, target = found.sources[late[0]], found.targets[late[0]]
            raise ValueError(f"source {source} is after its target {target}: no token reads ahead")
        return found

    def check(self, x: Float[Tensor, "b t d"]) -> None:
        """Hold them to a batch."""
        check_below("targets", self.targets, x.shape[1], "sequence length")
        if self.rows is not None:
            check_below("rows", self.rows, x.shape[0], "rows of the batch")

    def marks(self, batch: Int[Tensor, " b"], shape: tuple[int, ...]) -> Bool[Tensor, "b h t s"]:
        """Return the matrices of these rows of the batch, True at the entries."""
        b, h, t, s = shape
        heads = torch.arange(h) if self.heads is None else self.heads
        check_below("heads", heads, h, "heads of the matrix")
        edges = torch.zeros(b, t, s, dtype=torch.bool)
        if self.rows is None:
            edges[:, self.targets, self.sources] = True
        else:
            of, edge = (batch.cpu()[:, None] == self.rows).nonzero(as_tuple=True)
            edges[of, self.targets[edge], self.sources[edge]] = True
        of_head = torch.zeros(h, dtype=torch.bool)
        of_head[heads] = True
        return edges.to(batch.device)[:, None] & of_head.to(batch.device)[:, None, None]


class _ByMatrix:
    """Stands in for a mixer's forward: y = project(x, M @ values), both of them edited.

    Attributes:
        mixer: whose forward it is.
        checks: of the input, before anything is computed.
        blocked: entries that attention does not read, by their scores.
        edits: of the matrix, in the order in which they act.
        swaps: of the values [b h s p], likewise.
        proven: whether the matrix is known to be what the mixer applies.
        proving: whether the mixer's own forward is running, to see that.
    """

    def __init__(self, mixer: nn.Module):
        assert isinstance(mixer, MatrixMixer)
        self.mixer = mixer
        self.checks: list[Callable[[Tensor], None]] = []
        self.blocked: list[_Edges] = []
        self.edits: list[Edit] = []
        self.swaps: list[Edit] = []
        # Not of their heirs, which may apply anything.
        self.proven = type(mixer) in (Attention, InnerFunctionAttention, SSD)
        self.proving = False

    def __call__(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        return self._applied(x)

    # Compiled code, which meets the other forward, has no use for this one's graph.
    @keep_eager
    def _applied(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        mixer = self.mixer
        for check in self.checks:
            check(x)
        if isinstance(mixer, SSD) and (mixer.hook_ssm_write.active or mixer.hook_ssm_state.active):
            raise ValueError(
                "hook_ssm_write and hook_ssm_state are not met while a matrix is edited: "
                "what is read then is no one state"
            )
        if not self.proven:
            convert_errors(self._prove, type(mixer))(x[:1])
            self.proven = True
        parts = torch.arange(len(x), device=x.device).split(self._rows_at_once(x))
        return mixer.project(x, torch.cat([self._mixed(x[rows], rows) for rows in parts]))

    def _rows_at_once(self, x: Float[Tensor, "b t d"]) -> int:
        """Return how many rows of the batch are mixed at once: all, where something needs all."""
        modules = list(self.mixer.modules())
        watched = any(isinstance(m, HookPoint) and m.active for m in modules)
        if watched or any(isinstance(m, OracleMask) for m in modules):
            return len(x)
        if isinstance(self.mixer, Attention | SSD):
            n_heads = self.mixer.n_heads
        else:
            n_heads = self.mixer.matrix(x[:1]).shape[1]
        return max(1, BLOCK_ENTRIES // (n_heads * x.shape[1] ** 2))

    def _mixed(
        self, x: Float[Tensor, "b t d"], rows: Int[Tensor, " b"]
    ) -> Float[Tensor, "b h t p"]:
        with ExitStack() as stack:
            if isinstance(self.mixer, Attention) and self.blocked:
                point = self.mixer.hook_attn_scores

                def close(scores: Tensor, point: HookPoint) -> Tensor:
                    return self._unread(scores, rows)

                stack.callback(point.add_hook(close))
            matrix = self.mixer.matrix(x)
        for edit in self.edits:
            shape = matrix.shape
            matrix = edit(matrix, rows)
            if not isinstance(matrix, Tensor) or matrix.shape != shape:
                got = list(matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
                raise ValueError(f"edit returned {got}, must be {list(shape)} as it was given")
        values = self.mixer.values(x)
        for swap in self.swaps:
            values = swap(values, rows)
        return matrix @ values

    def _unread(
        self, scores: Float[Tensor, "b h t s"], rows: Int[Tensor, " b"]
    ) -> Float[Tensor, "b h t s"]:
        """Return scores of −∞ at blocked entries; a row with nothing else keeps its own."""
        closed = scores
        for edges in self.blocked:
            closed = closed.masked_fill(edges.marks(rows, tuple(scores.shape)), -torch.inf)
        empty = (closed == -torch.inf).all(-1, keepdim=True)
        return torch.where(empty, scores, closed)

    def _prove(self, x: Float[Tensor, "1 t d"]) -> None:
        """Refuse a mixer whose matrix is not what it applies: edits of it would mean nothing."""
        with torch.no_grad():
            self.proving = True
            try:
                y = type(self.mixer).forward(self.mixer, x)
            finally:
                self.proving = False
            applied = self.mixer.project(x, self.mixer.matrix(x) @ self.mixer.values(x))
            off = ((applied - y).norm() / y.norm().clamp(min=torch.finfo(y.dtype).tiny)).item()
        if not off <= torch.finfo(y.dtype).eps ** 0.5:
            raise ValueError(
                f"project(x, matrix(x) @ values(x)) is {off:.2g} of forward(x) away from it"
            )


@contextmanager
def _by_matrix(model: nn.Module, layer: int) -> Iterator[_ByMatrix]:
    """Let a mixer be applied as a matrix; of whole sequences, so that it must not decode."""
    mixer = get_mixer(model, layer)
    name = type(mixer).__name__
    if not isinstance(mixer, MatrixMixer):
        raise ValueError(f"{layer=}: {name} has no matrix, values and project to edit")
    standing = vars(mixer).get("forward")
    if isinstance(standing, _ByMatrix):
        yield standing
        return

    edited = _ByMatrix(mixer)

    def refusing(method: Callable) -> Callable:
        def decode(*args: Any, **options: Any) -> Any:
            # A forward of its own may be made of these.
            if edited.proving:
                return method(*args, **options)
            raise ValueError(f"{name} cannot decode while its matrix is edited: run it whole")

        return decode

    stand_ins: dict[str, Callable] = {"forward": edited}
    if isinstance(mixer, Decoder):
        stand_ins |= {"prefill": refusing(mixer.prefill), "step": refusing(mixer.step)}
    with ExitStack() as stack:
        for method, stand_in in stand_ins.items():
            stack.callback(_put_back, mixer, method, vars(mixer).get(method))
            setattr(mixer, method, stand_in)
        yield edited


def _put_back(mixer: nn.Module, method: str, before: Callable | None) -> None:
    """Undo a method's replacement: the class's shows again, or what the mixer itself had."""
    delattr(mixer, method)
    if before is not None:
        setattr(mixer, method, before)

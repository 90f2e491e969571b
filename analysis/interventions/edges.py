"""Which entries of a mixer's matrix are blocked: target, source, row of the batch and head."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from analysis.interventions.places import Indices, check_below, check_lengths, to_indices


@dataclass(frozen=True)
class BlockedEdges:
    """Entries of matrices [b h t s].

    Attributes:
        targets: t of each entry.
        sources: s of each entry.
        rows: b of each entry; None: all rows.
        heads: h, the same for all entries; None: all heads.
    """

    targets: Int[Tensor, " n"]
    sources: Int[Tensor, " n"]
    rows: Int[Tensor, " n"] | None
    heads: Int[Tensor, " m"] | None

    @classmethod
    def of(
        cls, targets: Indices, sources: Indices, rows: Indices | None, heads: Indices | None
    ) -> "BlockedEdges":
        """Check the indices of n entries and return them.

        Raises:
            ValueError: for values that are not indices, lists of different lengths, or a source
                after its target.
        """
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
        """Check that the entries exist in a batch.

        Raises:
            ValueError: for a target or a row past the last.
        """
        check_below("targets", self.targets, x.shape[1], "sequence length")
        if self.rows is not None:
            check_below("rows", self.rows, x.shape[0], "rows of the batch")

    def mark(self, batch: Int[Tensor, " b"], shape: tuple[int, ...]) -> Bool[Tensor, "b h t s"]:
        """Return matrices of these rows of the batch that are True at the entries.

        Raises:
            ValueError: for a head past the last.
        """
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

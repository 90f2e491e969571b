"""A mixer seen as one matrix: read off a model, whole or by blocks of rows."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from analysis.base import NotApplicableError
from analysis.memory import BLOCK_ENTRIES
from lab.hooks import HookPoint
from lab.laws import MatrixMixer
from lab.layers.attention import Attention
from lab.layers.mask import OracleMask, reveal_stored
from lab.layers.ssd import SSD
from lab.models import Block, LanguageModel
from lab.models.evaluation import find_stored_positions, score
from tasks.base import Batch

TOLERANCE = 1e-3
"""How far, of its largest output, a mixer may be from what its matrix applies."""


@dataclass(frozen=True)
class Mixer:
    """A block's sequence mixer, and what it was given.

    Attributes:
        layer: index of the block.
        module: the mixer; it offers a matrix if it is a `MatrixMixer`.
        x: the mixer's input [b t d], the normed residual stream.
        keep: what its oracle mask keeps; None where it has none.
    """

    layer: int
    module: nn.Module
    x: Float[Tensor, "b t d"]
    keep: Bool[Tensor, "b t"] | None = None

    @property
    def kind(self) -> str:
        """The mixer's class."""
        return type(self.module).__name__

    @property
    def form(self) -> str:
        """Which matrix this is, in a few words."""
        if isinstance(self.module, Attention):
            return "pattern A, rows sum to 1"
        if isinstance(self.module, SSD):
            return "M̃ = L∘CBᵀ·dt + D"
        return "matrix(x), y = M · values"

    def matrix(self, row: int, rows: slice | None = None) -> Float[Tensor, "h t s"]:
        """Return the matrix of one row of the batch, or some of its rows (target positions).

        Raises:
            NotApplicableError: when a mixer that is not the lab's own raises.
        """
        module, x = self.module, self.x[row : row + 1]
        assert isinstance(module, MatrixMixer)
        if isinstance(module, Attention | SSD):
            keep = None if self.keep is None else self.keep[row : row + 1]
            with nullcontext() if keep is None else reveal_stored(module, keep):
                return module.matrix(x, rows)[0].float()
        matrix = self._answered("matrix", lambda: module.matrix(x))[0].float()
        return matrix if rows is None else matrix[:, rows]

    def prove(self) -> None:
        """Hold a mixer that is not the lab's own to its matrix, on the first row of the batch.

        Raises:
            NotApplicableError: when its matrix raises, is not [b h t s], is not finite, or is not
                what forward applies.
        """
        module, x = self.module, self.x[:1]
        if not isinstance(module, MatrixMixer) or isinstance(module, Attention | SSD):
            return
        seq_len = x.shape[1]
        matrix = self._answered("matrix", lambda: module.matrix(x))
        if matrix.ndim != 4 or matrix.shape[-2:] != (seq_len, seq_len):
            raise NotApplicableError(
                f"{self.kind}.matrix is {list(matrix.shape)}, must be [b h t s], "
                f"[1 h {seq_len} {seq_len}]"
            )
        if not matrix.isfinite().all():
            raise NotApplicableError(f"{self.kind}.matrix is not finite")
        y = self._answered("forward", lambda: module(x))
        applied = self._answered("project", lambda: module.project(x, matrix @ module.values(x)))
        off, size = (applied - y).abs().max().item(), y.abs().max().item()
        if off > TOLERANCE * size:
            raise NotApplicableError(
                f"{self.kind}.matrix is not what forward applies: project(x, matrix @ values) is "
                f"off by {off / size:.2g} of its largest output"
            )

    def _answered(self, name: str, call: Callable[[], Tensor]) -> Tensor:
        """Return what a mixer's method returns; whatever a user's raises becomes one line."""
        try:
            return call()
        except Exception as error:
            where = f"{self.kind}.{name}"
            raise NotApplicableError(f"{where} raised {type(error).__name__}: {error}") from error

    def blocks(self, row: int, multiple: int = 1) -> Iterator[tuple[slice, Float[Tensor, "h t s"]]]:
        """Yield the matrix of one row of the batch by blocks of target positions, first to last.

        Args:
            row: of the batch.
            multiple: of which a block's height is one, but for the last.
        """
        seq_len = self.x.shape[1]
        whole = None if isinstance(self.module, Attention | SSD) else self.matrix(row)
        heads = len(self.matrix(row, slice(0, 1)) if whole is None else whole)
        height = multiple * max(1, BLOCK_ENTRIES // (seq_len * heads * multiple))
        for first in range(0, seq_len, height):
            rows = slice(first, min(seq_len, first + height))
            yield rows, self.matrix(row, rows) if whole is None else whole[:, rows]


@torch.no_grad()
def collect_mixers(model: LanguageModel, batch: Batch) -> list[Mixer]:
    """Return every block's mixer with its input on a batch; blocks without one are left out.

    The inputs are met on their way; no layer is changed.

    Raises:
        NotApplicableError: when the matrix of a mixer that is not the lab's own cannot be had, or
            is not what it applies.
    """
    found: list[Mixer] = []

    def look(residual: Tensor, point: HookPoint) -> None:
        layer = int(point.name.split(".")[1])
        block = model.blocks[layer]
        assert isinstance(block, Block)
        if block.mixer is not None and block.norm_mixer is not None:
            told = any(isinstance(module, OracleMask) for module in block.mixer.modules())
            keep = find_stored_positions(batch) if told else None
            found.append(Mixer(layer, block.mixer, block.norm_mixer(residual), keep))

    with model.hooks([(lambda name: name.endswith("hook_resid_pre"), look)]):
        score(model, batch, "fp32")
    for mixer in found:
        mixer.prove()
    return found

"""A mixer seen as one matrix: read off a model, whole or by blocks of rows."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lab.files import RunError
from lab.hooks import HookPoint
from lab.laws import MatrixMixer
from lab.layers.attention import Attention
from lab.layers.mask import OracleMask, stored
from lab.layers.ssd import SSD
from lab.models import Block, LanguageModel
from lab.train import score, stored_positions
from tasks.base import Batch

BLOCK_ENTRIES = 2**22
"""Entries of a matrix that are in memory at once, where a mixer can give a few of its rows."""


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
            RunError: when a mixer that is not the lab's own raises.
        """
        assert isinstance(self.module, MatrixMixer)
        x = self.x[row : row + 1]
        if isinstance(self.module, Attention | SSD):
            keep = None if self.keep is None else self.keep[row : row + 1]
            with nullcontext() if keep is None else stored(self.module, keep):
                return self.module.matrix(x, rows)[0].float()
        try:
            matrix = self.module.matrix(x)[0].float()
        # A user's mixer may raise anything.
        except Exception as error:
            where = f"{self.kind}.matrix"
            raise RunError(f"{where} raised {type(error).__name__}: {error}") from error
        return matrix if rows is None else matrix[:, rows]

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
def mixers(model: LanguageModel, batch: Batch) -> list[Mixer]:
    """Return every block's mixer with its input on a batch; blocks without one are left out.

    The inputs are met on their way; no layer is changed.
    """
    found: list[Mixer] = []

    def look(residual: Tensor, point: HookPoint) -> None:
        layer = int(point.name.split(".")[1])
        block = model.blocks[layer]
        assert isinstance(block, Block)
        if block.mixer is not None and block.norm_mixer is not None:
            told = any(isinstance(module, OracleMask) for module in block.mixer.modules())
            keep = stored_positions(batch) if told else None
            found.append(Mixer(layer, block.mixer, block.norm_mixer(residual), keep))

    with model.hooks([(lambda name: name.endswith("hook_resid_pre"), look)]):
        score(model, batch, "fp32")
    return found

"""Read a mixer's matrix off a model, whole or by blocks of rows."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from analysis.base import NotApplicableError
from analysis.memory import BLOCK_ENTRIES
from lab.hooks import HookPoint
from lab.layers.convolution import CausalConvolution
from lab.layers.mask import has_oracle_mask, reveal_stored
from lab.layers.mixer import MatrixMixer, Mixer
from lab.machine import give_back_freed_memory
from lab.models import LanguageModel
from lab.models.evaluation import find_stored_positions, score
from lab.models.user_mixer import is_from_lab
from tasks.base import Batch

LARGE = 2**20
"""Entries from which on a matrix leaves gaps worth giving back; it would slow down smaller ones."""
REACH = 4
"""What `get_reach` assumes of a mixer that is not the lab's own."""
TOLERANCE = 1e-3
"""How far a mixer's output may be from what its matrix gives, as a share of its largest output."""
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class BlockMixer:
    """A block's sequence mixer, and the input that a batch gave it.

    Attributes:
        module: the mixer; it offers a matrix if it is a `MatrixMixer`.
        x: the mixer's input [b t d], the normed residual stream.
        keep: what its oracle mask keeps; None where it has none.
    """

    layer: int
    module: Mixer
    x: Float[Tensor, "b t d"]
    keep: Bool[Tensor, "b t"] | None = None

    @property
    def kind(self) -> str:
        """The mixer's class."""
        return type(self.module).__name__

    @property
    def form(self) -> str:
        """Which matrix this is, in a few words."""
        return self.module.matrix_form or "matrix(x), y = M · values"

    def matrix(self, row: int, rows: slice | None = None) -> Float[Tensor, "h t s"]:
        """Return the matrix of one row of the batch, or some of its rows (target positions).

        Raises:
            NotApplicableError: when a mixer that is not the lab's own raises, or what it returns is
                not [b h t s] or not finite.
        """
        module, x = self.module, self.x[row : row + 1]
        assert isinstance(module, MatrixMixer)
        with self._tell_mask(row):
            if rows is not None and module.takes_rows:
                found = self._answer("matrix", lambda: module.matrix(x, rows=rows))
                return self._check_matrix(found, rows.stop - rows.start)[0].float()
            found = self._check_matrix(self._answer("matrix", lambda: module.matrix(x)), x.shape[1])
        return found[0].float() if rows is None else found[0].float()[:, rows]

    def verify(self) -> None:
        """Check on the first row of the batch that a mixer applies the matrix that it returns.

        The lab's own mixers are not checked: the laws hold for them.

        Raises:
            NotApplicableError: when the matrix raises, is not [b h t s], is not finite, or is not
                what forward applies.
        """
        module, x = self.module, self.x[:1]
        if not isinstance(module, MatrixMixer) or is_from_lab(module):
            return
        matrices = [matrix for _, matrix in self.blocks(0)]
        with self._tell_mask(0):
            values = self._answer("values", lambda: module.values(x))
            mixed = [self._answer("values", lambda m=m: m.to(values) @ values) for m in matrices]
            y = self._answer("forward", lambda: module(x))
            applied = self._answer("project", lambda: module.project(x, torch.cat(mixed, 2)))
        off, size = (applied - y).abs().max().item(), y.abs().max().item()
        if off > TOLERANCE * size:
            raise NotApplicableError(
                f"{self.kind}.matrix is not what forward applies: project(x, matrix @ values) is "
                f"off by {off / size:.2g} of its largest output"
            )

    def blocks(self, row: int, multiple: int = 1) -> Iterator[tuple[slice, Float[Tensor, "h t s"]]]:
        """Yield the matrix of one row of the batch by blocks of target positions, first to last.

        The height of each block but the last is a multiple of `multiple`.
        """
        seq_len = self.x.shape[1]
        whole = None if self.module.takes_rows else self.matrix(row)
        heads = len(self.matrix(row, slice(0, 1)) if whole is None else whole)
        height = multiple * max(1, BLOCK_ENTRIES // (seq_len * heads * multiple))
        for first in range(0, seq_len, height):
            rows = slice(first, min(seq_len, first + height))
            yield rows, self.matrix(row, rows) if whole is None else whole[:, rows]
        if heads * seq_len**2 >= LARGE:
            # Gaps that a block leaves in the heap would not hold those of the next row.
            give_back_freed_memory()

    def measure_shares(
        self, row: int, targets: Int[np.ndarray, "*_"], sources: Int[np.ndarray, "*_"]
    ) -> Float[np.ndarray, "h ..."]:
        """Return |M_ij| / Σ_j |M_ij| of some entries of one row of the batch.

        It is 0 where the source is later than the target, the target is after the end, or the
        matrix has a row of zeros.
        """
        at, of = (torch.from_numpy(z).to(self.x.device) for z in (targets, sources))
        found = None
        for rows, matrix in self.blocks(row):
            if found is None:
                found = torch.zeros(len(matrix), *at.shape, dtype=torch.float64)
            inside = (at >= rows.start) & (at < rows.stop) & (of <= at)
            if inside.any():
                entry = matrix[:, at[inside] - rows.start, of[inside]].abs().double()
                total = matrix.abs().sum(-1, dtype=torch.float64)[:, at[inside] - rows.start]
                found[:, inside.cpu()] = (entry / total.clamp(min=TINY)).detach().cpu()
        assert found is not None
        return found.numpy()

    def _check_matrix(self, matrix: Tensor, height: int) -> Tensor:
        """Return a matrix of so many rows, if it is one; the lab's own are not checked."""
        seq_len = self.x.shape[1]
        if is_from_lab(self.module):
            return matrix
        if matrix.ndim != 4 or matrix.shape[-2:] != (height, seq_len):
            raise NotApplicableError(
                f"{self.kind}.matrix is {list(matrix.shape)}, must be [b h t s], "
                f"[1 h {height} {seq_len}]"
            )
        if not matrix.isfinite().all():
            raise NotApplicableError(f"{self.kind}.matrix is not finite")
        return matrix

    def _answer(self, name: str, call: Callable[[], Tensor]) -> Tensor:
        """Call one of the mixer's methods; what a user's mixer raises becomes one line."""
        if is_from_lab(self.module):
            return call()
        try:
            return call()
        except Exception as error:
            where = f"{self.kind}.{name}"
            raise NotApplicableError(f"{where} raised {type(error).__name__}: {error}") from error

    def _tell_mask(self, row: int) -> AbstractContextManager[object]:
        """Tell the mixer's oracle mask, if it has one, what a row of the batch stores."""
        return (
            nullcontext()
            if self.keep is None
            else reveal_stored(self.module, self.keep[row : row + 1])
        )


def get_reach(mixer: nn.Module) -> int:
    """Return in how many columns of a mixer's matrix a token may be: its convolution's width."""
    if not is_from_lab(mixer):
        return REACH
    convolutions = (part for part in mixer.modules() if isinstance(part, CausalConvolution))
    return max((part.width for part in convolutions), default=1)


@torch.no_grad()
def collect_mixers(model: LanguageModel, batch: Batch) -> list[BlockMixer]:
    """Return every block's mixer with its input on a batch; blocks without one are left out.

    A hook reads the inputs as they pass; no layer is changed.

    Raises:
        NotApplicableError: when the matrix of a mixer that is not the lab's own raises, or is not
            what it applies.
    """
    blocks = model.list_blocks()
    found: list[BlockMixer] = []

    def look(residual: Tensor, point: HookPoint) -> None:
        layer = int(point.name.split(".")[1])
        block = blocks[layer]
        if block.mixer is not None and block.norm_mixer is not None:
            keep = find_stored_positions(batch) if has_oracle_mask(block.mixer) else None
            found.append(BlockMixer(layer, block.mixer, block.norm_mixer(residual), keep))

    with model.hooks([(lambda name: name.endswith("hook_resid_pre"), look)]):
        score(model, batch, "fp32")
    for mixer in found:
        mixer.verify()
    return found

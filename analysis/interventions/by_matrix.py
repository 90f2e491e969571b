"""Apply a mixer by its matrix, so that the matrix and the values can be edited in between."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from analysis.interventions.edges import BlockedEdges
from analysis.interventions.places import get_mixer
from analysis.mixing import BLOCK_ENTRIES
from lab.compilation import keep_eager
from lab.hooks import HookPoint
from lab.layers.mask import has_oracle_mask
from lab.layers.mixer import (
    MatrixMixer,
    RecurrentMixer,
    RoundedMixer,
    SoftmaxMixer,
    offers_rows,
)
from lab.layers.state import Decoder
from lab.models.user_mixer import convert_errors, is_from_lab

Edit = Callable[[Tensor, Tensor], Tensor]
"""Gets a matrix [b h t s] and which rows of the batch it is of [b]; returns the one to apply."""


class MatrixForward:
    """Replaces a mixer's forward by y = project(x, M @ values), with both M and values edited.

    Attributes:
        mixer: whose forward it replaces.
        checks: of the input, before anything is computed.
        blocked: entries whose scores a softmax must not see.
        edits: of the matrix, in the order in which they act.
        swaps: of the values [b h s p], likewise.
        verified: whether the matrix is known to be the one that the mixer applies.
        verifying: whether the mixer's own forward is running, to find that out.
    """

    def __init__(self, mixer: nn.Module):
        assert isinstance(mixer, MatrixMixer)
        self.mixer = mixer
        self.checks: list[Callable[[Tensor], None]] = []
        self.blocked: list[BlockedEdges] = []
        self.edits: list[Edit] = []
        self.swaps: list[Edit] = []
        self.verified = is_from_lab(mixer)
        self.verifying = False

    def __call__(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return the output that the edited matrix and values give."""
        return self._apply(x)

    # Code compiled for the other forward has no use for a graph of this one.
    @keep_eager
    def _apply(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        mixer = self.mixer
        for check in self.checks:
            check(x)
        recurrent = mixer.recurrent_hooks if isinstance(mixer, RecurrentMixer) else ()
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
        watched = any(isinstance(m, HookPoint) and m.active for m in self.mixer.modules())
        if watched or has_oracle_mask(self.mixer):
            return len(x)
        mixer = self.mixer
        one = mixer.matrix(x[:1], rows=slice(0, 1)) if offers_rows(mixer) else mixer.matrix(x[:1])
        return max(1, BLOCK_ENTRIES // (one.shape[1] * x.shape[1] ** 2))

    def _mix(self, x: Float[Tensor, "b t d"], rows: Int[Tensor, " b"]) -> Float[Tensor, "b h t p"]:
        with ExitStack() as stack:
            if isinstance(self.mixer, SoftmaxMixer) and self.blocked:
                point = self._get_point(self.mixer.scores_hook)

                def close(scores: Tensor, point: HookPoint) -> Tensor:
                    return self._close_scores(scores, rows)

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

    def _close_scores(
        self, scores: Float[Tensor, "b h t s"], rows: Int[Tensor, " b"]
    ) -> Float[Tensor, "b h t s"]:
        """Return scores with −∞ at blocked entries; a row with nothing else keeps its own."""
        closed = scores
        for edges in self.blocked:
            closed = closed.masked_fill(edges.mark(rows, tuple(scores.shape)), -torch.inf)
        empty = (closed == -torch.inf).all(-1, keepdim=True)
        return torch.where(empty, scores, closed)

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
        if isinstance(self.mixer, RoundedMixer):
            eps = max(eps, torch.finfo(self.mixer.computed_in).eps)
        if not off <= eps**0.5:
            raise ValueError(
                f"project(x, matrix(x) @ values(x)) is off forward(x) by {off:.2g} of its norm"
            )


@contextmanager
def apply_by_matrix(model: nn.Module, layer: int) -> Iterator[MatrixForward]:
    """Apply a block's mixer by its matrix for a `with` block; it cannot decode meanwhile.

    Nested calls share one `MatrixForward`.

    Raises:
        ValueError: for a layer that the model does not have, or one whose mixer has no matrix.
    """
    mixer = get_mixer(model, layer)
    name = type(mixer).__name__
    if not isinstance(mixer, MatrixMixer):
        raise ValueError(f"{layer=}: {name} has no matrix, values and project to edit")
    current = vars(mixer).get("forward")
    if isinstance(current, MatrixForward):
        yield current
        return

    edited = MatrixForward(mixer)

    def refuse(method: Callable) -> Callable:
        def decode(*args: Any, **options: Any) -> Any:
            # The mixer's own forward may call its decoding methods.
            if edited.verifying:
                return method(*args, **options)
            raise ValueError(f"{name} cannot decode while its matrix is edited: run it whole")

        return decode

    replacements: dict[str, Callable] = {"forward": edited}
    if isinstance(mixer, Decoder):
        replacements |= {"prefill": refuse(mixer.prefill), "step": refuse(mixer.step)}
    with ExitStack() as stack:
        for method, replacement in replacements.items():
            stack.callback(_restore, mixer, method, vars(mixer).get(method))
            setattr(mixer, method, replacement)
        yield edited


def _restore(mixer: nn.Module, method: str, before: Callable | None) -> None:
    """Undo a method's replacement: back to the class's method, or what the mixer itself had."""
    delattr(mixer, method)
    if before is not None:
        setattr(mixer, method, before)

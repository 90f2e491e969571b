"""What a sequence mixer may offer beside `forward`: laws and analyses ask for these, not a class.

A mixer maps [b t d] to [b t d]. Everything else is optional: a mixer offers an ability by having
the methods or attributes of its protocol. Attributes that end in `_hook` or `_hooks` name hook
points of the mixer, such as "hook_pattern".
"""

import inspect
from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lab.ops.rope import Layout


@runtime_checkable
class MatrixMixer(Protocol):
    """A mixer that can return its mixing as one matrix per head.

    forward(x) = project(x, matrix(x) @ values(x)).
    """

    def matrix(self, x: Tensor, /) -> Tensor:
        """Return the matrix [b h t s]."""
        ...

    def values(self, x: Tensor, /) -> Tensor:
        """Return the values that it mixes [b h s p]."""
        ...

    def project(self, x: Tensor, z: Tensor, /) -> Tensor:
        """Return the output [b t d] from the mixed values z [b h t p]."""
        ...


@runtime_checkable
class HeadsMixer(MatrixMixer, Protocol):
    """A mixer whose heads' mixed values pass a hook point on their way into `project`."""

    @property
    def heads_hook(self) -> str:
        """The hook point of the mixed values [b t h p], which `project` takes as [b h t p]."""
        ...


@runtime_checkable
class SplitInputMixer(Protocol):
    """A mixer that reads x only to compute a few tensors with heads, each with a hook point."""

    @property
    def input_hooks(self) -> tuple[str, ...]:
        """Their hook points [b t h p]; the output depends on x through them alone."""
        ...


class MatrixRowsMixer(MatrixMixer, Protocol):
    """A mixer whose `matrix` can return some of its rows: long sequences need no whole matrix."""

    def matrix(self, x: Tensor, /, rows: slice | None = None) -> Tensor:
        """Return the matrix [b h t s], or its rows for a slice of target positions."""
        ...


@runtime_checkable
class PositionsMixer(Protocol):
    """A causal mixer that can compute its outputs at some positions only.

    With `at` [b q] it returns the outputs at those positions [b q d], exactly as if all had been
    computed. An output depends on no later token, so what follows the last position is never read.
    """

    def forward(self, x: Tensor, at: Tensor | None = None) -> Tensor:
        """Return the outputs [b t d], or [b q d] at some positions."""
        ...


@runtime_checkable
class DescribedMatrix(Protocol):
    """A mixer that says which matrix it returns."""

    @property
    def matrix_form(self) -> str:
        """A few words or a formula, such as "pattern A, rows sum to 1"."""
        ...


@runtime_checkable
class SoftmaxMixer(Protocol):
    """A mixer whose matrix is the softmax of scores, which pass a hook point in `matrix`."""

    @property
    def scores_hook(self) -> str:
        """The hook point of the scores [b h t s]; a score of −∞ takes that source away."""
        ...


@runtime_checkable
class BiasedMixer(Protocol):
    """A mixer that adds a bias to the scores of each key, or has a place for one."""

    @property
    def bias_hook(self) -> str:
        """The hook point of the biases [b h 1 s]; a hook on it adds them where there are none."""
        ...


@runtime_checkable
class RecurrentMixer(Protocol):
    """A mixer with hook points that exist only in its recurrent form, not in its matrix."""

    @property
    def recurrent_hooks(self) -> tuple[str, ...]:
        """The hook points of what the recurrence writes and holds."""
        ...


@runtime_checkable
class RoundedMixer(Protocol):
    """A mixer that computes some things in a lower precision than its input's."""

    @property
    def computed_in(self) -> torch.dtype:
        """The precision."""
        ...


@dataclass(frozen=True)
class RotaryPairs:
    """How a mixer rotates the two sides that it compares: queries and keys, or C and B.

    Comparison c is the product of one target vector and one source vector of 2 · n_pairs channels.

    Attributes:
        sides: what target and source are called, such as "Q/K".
        target_hook: the hook point of the targets before the rotation, [b t c n].
        source_hook: the hook point of the sources before the rotation, [b t g n].
        decay_hook: the hook point of the log-decay [b t h], ≤ 0; None without decay.
        source_of: for each comparison, the index g of its source.
        comparison_of: for each head of the matrix, its comparison c.
        n_pairs: pairs of channels.
        base: wavelength base.
        layout: which channels make a pair.
        scale: factor on the product.
    """

    sides: str
    target_hook: str
    source_hook: str
    decay_hook: str | None
    source_of: tuple[int, ...]
    comparison_of: tuple[int, ...]
    n_pairs: int
    base: float
    layout: Layout
    scale: float


@runtime_checkable
class RotaryMixer(Protocol):
    """A mixer that can compare channels after rotating them to their positions."""

    @property
    def rotary_pairs(self) -> RotaryPairs | None:
        """How it rotates; None when this one does not."""
        ...


def get_rotary_pairs(mixer: object) -> RotaryPairs | None:
    """Return how a mixer rotates what it compares; None when it does not."""
    return mixer.rotary_pairs if isinstance(mixer, RotaryMixer) else None


def offers_rows(mixer: object) -> TypeGuard[MatrixRowsMixer]:
    """Whether a mixer is a `MatrixRowsMixer`: its `matrix` takes an argument `rows`."""
    return isinstance(mixer, MatrixMixer) and "rows" in inspect.signature(mixer.matrix).parameters


def offers_positions(mixer: object) -> bool:
    """Whether a mixer is a `PositionsMixer`: its `forward` takes an argument `at`.

    A user's class must define that `forward` itself. One that inherits it from a layer of the lab
    may have changed something else that `forward` relies on.
    """
    own = type(mixer).__module__.partition(".")[0] == "lab"
    defines = own or "forward" in vars(type(mixer))
    if not (defines and isinstance(mixer, PositionsMixer)):
        return False
    return "at" in inspect.signature(mixer.forward).parameters


def take_positions(
    x: Float[Tensor, "b t *axes"], at: Int[Tensor, "b q"]
) -> Float[Tensor, "b q *axes"]:
    """Return x at some positions of each row."""
    first = x.shape[1] * torch.arange(len(at), device=at.device)
    # Gathering along the axis would take three times as long, as would indexing by two tensors.
    return x.flatten(0, 1).index_select(0, (first[:, None] + at).flatten()).unflatten(0, at.shape)

"""What a sequence mixer may offer beside `forward`: laws and analyses ask for this, not a class."""

import inspect
from abc import ABC
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lab.abilities import MatrixMixer as MatrixMixer
from lab.ops.rope import Layout


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


class Mixer(nn.Module, ABC):
    """A sequence mixer, [b t d] → [b t d], and what it offers: nothing more, unless it says so.

    A subclass overrides the attributes of what it offers. Those that end in `_hook` or `_hooks`
    name hook points of the mixer, such as "hook_pattern". Three abilities are methods:

        matrix, values, project   one matrix per head (`MatrixMixer`)
        start, prefill, step      going on from a state (`lab.abilities.Decoder`)
        state_bytes               the state's size, if it is not what `prefill` returns
                                  (`lab.abilities.StateCounter`)

    A module of any other class is adapted where a block gets it (`adapt`): it offers what it has
    of the same name.
    """

    matrix_form: str | None = None
    """Which matrix `matrix` returns: a few words or a formula, "pattern A, rows sum to 1"."""
    takes_rows: bool = False
    """Whether matrix(x, rows=slice) returns some rows: long sequences need no whole matrix."""
    takes_positions: bool = False
    """Whether forward(x, at=[b q]) returns the outputs at those positions alone, [b q d].

    They are exactly as if all had been computed, and depend on no later token, so that what follows
    the last position is never read.
    """
    heads_hook: str | None = None
    """The heads' mixed values [b t h p], which `project` takes as [b h t p]."""
    input_hooks: tuple[str, ...] = ()
    """Tensors with heads [b t h p], through which alone the output depends on x."""
    scores_hook: str | None = None
    """The scores [b h t s] whose softmax is the matrix; a score of −∞ takes that source away."""
    bias_hook: str | None = None
    """Biases of the keys' scores [b h 1 s]; a hook on it adds them where there are none."""
    recurrent_hooks: tuple[str, ...] = ()
    """What the recurrence writes and holds, which the matrix does not compute."""
    computed_in: torch.dtype | None = None
    """A precision lower than its input's in which it computes some things."""

    @property
    def rotary_pairs(self) -> RotaryPairs | None:
        """How it rotates what it compares; None where it does not."""
        return None


NOT_OFFERED = {name: vars(Mixer)[name] for name in Mixer.__annotations__} | {"rotary_pairs": None}
"""What a mixer has that offers nothing."""


def adapt(module: nn.Module) -> Mixer:
    """Let a module of any class answer what a `Mixer` is asked; its weights and names stay.

    Of a tuple that it returns the first item is its output, and the rest, e.g. its state, is left.

    Of what it does not have, it offers nothing. It takes rows or positions if its methods have an
    argument `rows` or `at`. A class outside the lab must define a `forward` with `at` itself: one
    that inherits it from a layer of the lab may have changed something else that it relies on.
    """
    cls = type(module)
    if Mixer in cls.__mro__ and cls.__module__.startswith("lab."):
        assert isinstance(module, Mixer)
        return module
    for name, nothing in NOT_OFFERED.items():
        if not (hasattr(cls, name) or hasattr(module, name)):
            setattr(module, name, nothing)
    if _take_first not in module._forward_hooks.values():
        module.register_forward_hook(_take_first)
    Mixer.register(cls)
    assert isinstance(module, Mixer)
    own = "forward" in vars(cls)
    module.takes_positions = own and "at" in inspect.signature(module.forward).parameters
    module.takes_rows = (
        isinstance(module, MatrixMixer) and "rows" in inspect.signature(module.matrix).parameters
    )
    return module


def _take_first(module: nn.Module, given: object, output: object) -> object:
    """Return the first item of a tuple that starts with a tensor, e.g. of (y, state)."""
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        return output[0]
    return output


def take_positions(
    x: Float[Tensor, "b t *axes"], at: Int[Tensor, "b q"]
) -> Float[Tensor, "b q *axes"]:
    """Return x at some positions of each row."""
    first = x.shape[1] * torch.arange(len(at), device=at.device)
    # Gathering along the axis would take three times as long, as would indexing by two tensors.
    return x.flatten(0, 1).index_select(0, (first[:, None] + at).flatten()).unflatten(0, at.shape)

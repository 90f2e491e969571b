"""Modules that carry a state from token to token, in the common ways."""

from collections.abc import Callable
from inspect import Parameter, signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lab.laws.adapters.plain import (
    Carried,
    PlainAdapter,
    copy_state,
    extend_state,
    get_item,
    lay_out,
    lend_state,
    make_start_state,
    refuse_padding,
)


class Stateful(PlainAdapter):
    """A module that goes on from a state and takes no padding; subclasses define `advance`.

    Args:
        relative: whether only differences of positions count; None makes no claim.
    """

    paddings = ()

    def __init__(
        self,
        module: Any,
        relative: bool | None = None,
        output: int | str | None = None,
        layout: str = "btd",
    ):
        super().__init__(module, output, layout)
        if relative is not None:
            self.relative = relative

    def start(self, batch: int, position: int = 0) -> Carried:
        """Return the state before the first token.

        Raises:
            ValueError: for a position other than 0, which the module could not be told.
        """
        if position:
            raise ValueError(f"{position=} must be 0: this module takes no first position")
        weight = next(self.module.parameters(), torch.zeros(0))
        return make_start_state(batch, position, weight.device)

    def prefill(
        self, x: Tensor, state: Carried | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Carried]:
        """Return the outputs of further tokens, and the state after them."""
        kept = refuse_padding(x, keep)
        before = self.start(len(x)) if state is None else state
        y, held = self.advance(x, self.lend(before.held))
        return y, extend_state(before, kept, held)

    def step(self, x: Tensor, state: Carried) -> tuple[Tensor, Carried]:
        """Return the output of one further token, and the state after it."""
        y, state = self.prefill(x[:, None], state)
        return y[:, 0], state

    def lend(self, held: Any) -> Any:
        """Return what a call is given of a state."""
        return lend_state(held)

    def advance(self, x: Tensor, held: Any) -> tuple[Tensor, Any]:
        """Return the outputs of further tokens, and the module's state; `held` is None at first."""
        raise NotImplementedError


def take_each(x: Tensor, held: Any, step: Callable[..., Any], timed: bool) -> tuple[Tensor, Any]:
    """Return the outputs of token after token, and the state after them.

    Args:
        x: the tokens [b t …].
        held: the state before them.
        step: (token, state) → (output, state).
        timed: whether tokens and outputs have an axis of one for the time.
    """
    outputs = []
    for i in range(x.shape[1]):
        y, held = step(x[:, i : i + 1] if timed else x[:, i], held)
        outputs.append(y)
    return (torch.cat if timed else torch.stack)(outputs, 1), held


class Returned(Stateful):
    """A module that returns its state and takes it back: forward(x, state) → (y, state).

    Args:
        name: name of its parameter for the state.
        place: which item or field of what it returns is the state.
        flag: parameter that must be True for the state to be returned.
        initial: method that makes the state of `batch` rows before any token; None where the
            module needs no first state, or takes None.
    """

    def __init__(
        self,
        module: Any,
        name: str,
        place: int | str = 1,
        flag: str | None = None,
        initial: str | None = None,
        relative: bool | None = None,
        output: int | str | None = 0,
        layout: str = "btd",
    ):
        super().__init__(module, relative, output, layout)
        self.name, self.place, self.flag, self.initial = name, place, flag, initial

    def call(self, x: Tensor) -> Any:
        """Return what the module returns without an earlier state."""
        return self.module(lay_out(x, self.layout), **self.make_state_argument(len(x)))

    def lend(self, held: Any) -> Any:
        """Return what a call is given of a state, as the parameter's name says."""
        return lend_state(held, self.name)

    def advance(self, x: Tensor, held: Any) -> tuple[Tensor, Any]:
        """Return the outputs of further tokens, and the state returned with them."""
        options = self.make_state_argument(len(x)) if held is None else {self.name: held}
        if self.flag is not None:
            options[self.flag] = True
        found = self.module(lay_out(x, self.layout), **options)
        return self.take_sequence(found), get_item(found, self.place)

    def make_state_argument(self, batch: int) -> dict[str, Any]:
        """Return the argument for the state before any token, if one is needed."""
        if self.initial is not None:
            return {self.name: copy_state(getattr(self.module, self.initial)(batch))}
        forward = self.module.forward if isinstance(self.module, nn.Module) else self.module
        required = signature(forward).parameters[self.name].default is Parameter.empty
        return {self.name: None} if required else {}


class Stepping(Stateful):
    """A module with a method for one token, step(x [b d], state) → (y [b e], state).

    Args:
        initial: method that makes the state of `batch` rows before any token; None where step takes
            None at first.
        timed: whether step takes [b 1 d] and returns [b 1 e].
    """

    def __init__(
        self,
        module: Any,
        initial: str | None = None,
        timed: bool = False,
        relative: bool | None = None,
        output: int | str | None = None,
        layout: str = "btd",
    ):
        super().__init__(module, relative, output, layout)
        self.initial, self.timed = initial, timed

    def advance(self, x: Tensor, held: Any) -> tuple[Tensor, Any]:
        """Return the outputs of token after token, and the state after them."""
        if held is None and self.initial is not None:
            held = copy_state(getattr(self.module, self.initial)(len(x)))
        return take_each(x, held, self.module.step, self.timed)


class Allocated(Stateful):
    """A mixer of mamba-ssm: allocate_inference_cache, and step(x [b 1 d], *state) → (y, *state).

    The first tokens are read at once where its forward takes `inference_params` and it has a
    `layer_idx`, under which it stores its state; tokens after a state are read by step only.

    Args:
        timed: whether step takes [b 1 d] and returns [b 1 e], as mamba-ssm's does, or [b d].

    Source: state-spaces/mamba, mamba_ssm/modules and mamba_ssm/utils/generation.py.
    """

    def __init__(
        self,
        module: Any,
        timed: bool = True,
        relative: bool | None = None,
        output: int | str | None = None,
        layout: str = "btd",
    ):
        super().__init__(module, relative, output, layout)
        self.timed = timed

    def lend(self, held: Any) -> Any:
        """Return a copy of a state, into which mamba-ssm's step writes by design."""
        return copy_state(held)

    def advance(self, x: Tensor, held: Any) -> tuple[Tensor, Any]:
        """Return the outputs of further tokens, and the state, which is written in place."""
        if held is not None:
            return self.step_each(x, held)
        # The state has a fixed size, so the maximum length asked for does not matter.
        held = self.module.allocate_inference_cache(len(x), 1, dtype=x.dtype)
        layer = getattr(self.module, "layer_idx", None)
        if layer is None or "inference_params" not in signature(self.module.forward).parameters:
            return self.step_each(x, held)
        memory = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={layer: held})
        return self.take_sequence(self.module(x, inference_params=memory)), held

    def step_each(self, x: Tensor, held: Any) -> tuple[Tensor, Any]:
        """Return the outputs of token after token, and the state after them."""

        def step(token: Tensor, state: Any) -> tuple[Tensor, Any]:
            y, *after = self.module.step(token, *state)
            return y, tuple(after)

        return take_each(x, held, step, self.timed)

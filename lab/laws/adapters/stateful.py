"""Modules that carry a state from token to token, in the ways that are common."""

from inspect import Parameter, signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lab.laws.adapters.carried import Carried, after, before_any, copied, without_padding
from lab.laws.adapters.plain import Plain, item, laid


class Stateful(Plain):
    """A module that goes on from a state, and knows no padding; each kind says how, in `going`.

    Args:
        relative: whether only differences of positions count; None says nothing of it.
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
        """Return the state before the first token."""
        weight = next(self.module.parameters(), torch.zeros(0))
        return before_any(batch, position, weight.device)

    def prefill(
        self, x: Tensor, state: Carried | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Carried]:
        """Return the outputs of further tokens, and the state after them."""
        kept = without_padding(x, keep)
        before = self.start(len(x)) if state is None else state
        # A module may write into its state: a copy of it, so that each state stays what it was.
        y, held = self.going(x, copied(before.held))
        return y, after(before, kept, held)

    def step(self, x: Tensor, state: Carried) -> tuple[Tensor, Carried]:
        """Return the output of one further token, and the state after it."""
        y, state = self.prefill(x[:, None], state)
        return y[:, 0], state

    def going(self, x: Tensor, held: Any) -> tuple[Tensor, Any]:
        """Return the outputs of further tokens, and the module's own state, None before any."""
        raise NotImplementedError


class Returned(Stateful):
    """A module that returns its state and takes it back: forward(x, state) → (y, state).

    Args:
        name: of its parameter for the state.
        place: which item of what it returns, or field, is the state.
        flag: parameter that is to be True for a state to be returned.
        initial: method that makes the state of so many rows before any token; None: it needs none,
            or takes None for it.
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

    def called(self, x: Tensor) -> Any:
        """Return what the module does before it has a state."""
        return self.module(laid(x, self.layout), **self.begun(len(x)))

    def going(self, x: Tensor, held: Any) -> tuple[Tensor, Any]:
        """Return the outputs of further tokens, and the state that came beside them."""
        options = self.begun(len(x)) if held is None else {self.name: held}
        if self.flag is not None:
            options[self.flag] = True
        found = self.module(laid(x, self.layout), **options)
        return self.sequence(found), item(found, self.place)

    def begun(self, batch: int) -> dict[str, Any]:
        """Return the argument for the state of rows that have read nothing, if one is needed."""
        if self.initial is not None:
            return {self.name: copied(getattr(self.module, self.initial)(batch))}
        forward = self.module.forward if isinstance(self.module, nn.Module) else self.module
        required = signature(forward).parameters[self.name].default is Parameter.empty
        return {self.name: None} if required else {}


class Stepping(Stateful):
    """A module with a method for one token, step(x [b d], state) → (y [b e], state).

    Args:
        initial: method that makes the state of so many rows before any token.
    """

    def __init__(
        self,
        module: Any,
        initial: str,
        relative: bool | None = None,
        output: int | str | None = None,
        layout: str = "btd",
    ):
        super().__init__(module, relative, output, layout)
        self.initial = initial

    def going(self, x: Tensor, held: Any) -> tuple[Tensor, Any]:
        """Return the outputs of token after token, and the state after them."""
        if held is None:
            held = copied(getattr(self.module, self.initial)(len(x)))
        outputs = []
        for i in range(x.shape[1]):
            y, held = self.module.step(x[:, i], held)
            outputs.append(y)
        return torch.stack(outputs, 1), held


class Allocated(Stateful):
    """A mixer of mamba-ssm: allocate_inference_cache, and step(x [b 1 d], *state) → (y, *state).

    The first tokens are read at once where its forward takes `inference_params` and it has the
    number of a layer to keep its state under; those after a state, by step, as it has no other way.

    Source: state-spaces/mamba, mamba_ssm/modules and mamba_ssm/utils/generation.py.
    """

    def going(self, x: Tensor, held: Any) -> tuple[Tensor, Any]:
        """Return the outputs of further tokens, and the state, which is written in place."""
        if held is not None:
            return self.stepped(x, held)
        # A state of fixed size has no use for the longest length that it is asked for.
        held = self.module.allocate_inference_cache(len(x), 1, dtype=x.dtype)
        layer = getattr(self.module, "layer_idx", None)
        if layer is None or "inference_params" not in signature(self.module.forward).parameters:
            return self.stepped(x, held)
        memory = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={layer: held})
        return self.sequence(self.module(x, inference_params=memory)), held

    def stepped(self, x: Tensor, held: Any) -> tuple[Tensor, Any]:
        """Return the outputs of token after token, and the state after them."""
        outputs = []
        for i in range(x.shape[1]):
            y, *held = self.module.step(x[:, i : i + 1], *held)
            outputs.append(y)
        return torch.cat(outputs, 1), tuple(held)

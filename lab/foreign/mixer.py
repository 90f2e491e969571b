"""A sequence mixer of another library, called like one of the lab's: [b t d] to [b t d].

Layers of transformers get more than their input: rotations, a mask, a cache. A mixer remembers what
its model gave it beside the input, so that it can be called on an input alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lab.hooks import HookPoint
from lab.layers.mixer import Mixer

LAYER_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past", "cache_params")
"""What a layer's parameters for a cache are called."""


class Call(NamedTuple):
    """What a layer is given beside its input."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def cached(self) -> bool:
        """Whether the layer goes on from a cache, or fills one."""
        return any(self.kwargs.get(name) is not None for name in LAYER_CACHES)


class ForeignPart(nn.Module):
    """A part of a foreign model, which computes as it did.

    Args:
        module: the part.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Float[Tensor, "*axes d"]) -> Float[Tensor, "*axes d"]:
        """Return what the foreign part returns."""
        return self.module(x)

    def extra_repr(self) -> str:
        """Return the foreign class."""
        return f"{type(self.module).__module__}.{type(self.module).__name__}"


class ForeignMixer(ForeignPart, Mixer):
    """A foreign sequence mixer. [b t d] → [b t d].

    Args:
        module: the foreign layer; its first parameter is the input, and what it returns begins with
            the output.
        rehearse: runs the model on a row like an input [b t d], so that it calls this mixer.
    """

    # Other libraries compute some things in fp32, also in a model in fp64.
    computed_in = torch.float32

    def __init__(self, module: nn.Module, rehearse: Callable[[Tensor], object] | None = None):
        super().__init__(module)
        self._rehearse = rehearse
        self._call: Call | None = None
        self._batch = 0
        self._rest: tuple[Any, ...] = ()
        self._kept: tuple[tuple[Any, ...], Call] | None = None

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return what the foreign layer returns."""
        return self.run(x)

    def answer(self, x: Float[Tensor, "b t d"], call: Call) -> Any:
        """Return what the foreign layer returns when its model calls it."""
        if not call.cached:
            self._kept = _get_key(x), _keep_row(call)
        # A form that does not run the layer returns nothing beside its output.
        self._call, self._batch, self._rest = call, len(x), (None,) * len(self._rest)
        try:
            y = self(x)
        finally:
            self._call = None
        return (y, *self._rest) if self._rest else y

    def run(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Run the foreign layer in the call in progress, or as its model calls it on such rows."""
        live = self._call is not None and len(x) == self._batch
        call = self._call if live else self.find_call(x)
        assert call is not None
        call = self._change_call(call)
        found = self.module(x.contiguous(), *call.args, **call.kwargs)
        if not isinstance(found, tuple):
            return found
        self._rest = found[1:]
        return found[0]

    def find_call(self, x: Float[Tensor, "b t d"]) -> Call:
        """Return what the model gives the layer beside rows like x, without a cache."""
        if self._kept is None or self._kept[0] != _get_key(x):
            assert self._rehearse is not None
            self._rehearse(x)
        assert self._kept is not None
        return self._kept[1]

    def _change_call(self, call: Call) -> Call:
        """Return what to call the layer with, in place of what its model gives it."""
        return call

    def refuse_decoding(self, what: str) -> None:
        """Raise if the call in progress has a cache.

        Raises:
            ValueError: saying that the layer cannot do `what` meanwhile.
        """
        if self._call is not None and self._call.cached:
            name = type(self.module).__name__
            raise ValueError(f"{name} cannot {what} while it decodes from a cache: run it whole")


class Route(nn.Module):
    """Stands in a foreign model where a mixer stood, and passes calls on to its `ForeignMixer`.

    Args:
        mixer: what is called.
    """

    def __init__(self, mixer: ForeignMixer):
        super().__init__()
        self.mixer = mixer
        self.hook_out = HookPoint()  # [b t d]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the foreign layer would."""
        returned = self.mixer.answer(*split_call(args, kwargs))
        return map_output(partial(pass_copied, self.hook_out), returned)


def pass_copied(point: HookPoint, x: Tensor) -> Tensor:
    """Return a tensor after a hook point: a copy if it has hooks, as layers may add in place to it.

    Falcon adds what attention returns to what its MLP has returned.
    """
    return point(x).clone() if point.active else x


def map_output(call: Callable[[Tensor], Tensor], returned: Any) -> Any:
    """Apply a function to the first thing that a foreign layer returned, or to the only one."""
    return (call(returned[0]), *returned[1:]) if isinstance(returned, tuple) else call(returned)


def split_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Call]:
    """Return a layer's input, and what it is given beside it."""
    if args:
        return args[0], Call(args[1:], kwargs)
    rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
    return kwargs["hidden_states"], Call((), rest)


def _get_key(x: Tensor) -> tuple[Any, ...]:
    return x.shape[1], x.dtype, x.device


def _keep_row(call: Call) -> Call:
    """Return a call for a batch of any size: of tensors [b …], those of the first row."""

    def keep(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(keep(item) for item in value)
        if not isinstance(value, Tensor):
            return value
        return value.detach()[:1] if value.ndim > 1 else value.detach()

    return Call(keep(call.args), {name: keep(value) for name, value in call.kwargs.items()})


def is_close(found: Tensor, asked: Tensor) -> bool:
    """Whether two tensors agree to half of the digits of fp32, or of their own lower precision.

    In models in fp64, too, the libraries compute some things in fp32.
    """
    eps = max(torch.finfo(asked.dtype).eps, torch.finfo(torch.float32).eps)
    size = asked.norm().clamp(min=torch.finfo(asked.dtype).tiny)
    return bool((found - asked).norm() <= eps**0.5 * size)

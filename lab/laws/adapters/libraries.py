"""Adapters of modules of torch and transformers."""

import sys
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from lab.laws.adapters.plain import (
    Carried,
    PlainAdapter,
    copy_state,
    extend_state,
    keep_all,
    lay_out,
    make_start_state,
)
from lab.laws.adapters.stateful import Stateful


class TorchRecurrent(Stateful):
    """torch's RNN, GRU or LSTM, of one direction; its states [layers b h] are kept as [b layers h].

    It reads no positions, so by default only differences of positions count.
    """

    def __init__(
        self,
        module: Any,
        relative: bool = True,
        output: int | str | None = 0,
        layout: str = "btd",
    ):
        super().__init__(module, relative, output, layout)

    def start(self, batch: int, position: int = 0) -> Carried:
        """Return the state before the first token, at any position: none is read."""
        state = super().start(batch)
        return state._replace(position=state.position + position)

    def advance(self, x: Tensor, held: Any) -> tuple[Tensor, Any]:
        """Return the outputs of further tokens, and the states, (h,) or (h, c)."""
        hidden = None
        if held is not None:
            hidden = tuple(h.transpose(0, 1).contiguous() for h in held)
            hidden = hidden if isinstance(self.module, nn.LSTM) else hidden[0]
        y, hidden = self.module(lay_out(x, self.layout), hidden)
        hidden = hidden if isinstance(hidden, tuple) else (hidden,)
        return lay_out(y, self.layout), tuple(h.transpose(0, 1) for h in hidden)


class Masked(PlainAdapter):
    """torch's MultiheadAttention, TransformerEncoderLayer or TransformerEncoder, under a mask.

    Causality is requested twice: by the mask [t s], True where s is later than t, and by
    `is_causal`, which allows a kernel that does not read the mask.
    """

    def call(self, x: Tensor) -> Any:
        """Return the self-attention over x."""
        given, t = lay_out(x, self.layout), x.shape[1]
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        if isinstance(self.module, nn.MultiheadAttention):
            options = {"attn_mask": mask, "is_causal": True, "need_weights": False}
            return self.module(given, given, given, **options)
        return self.module(given, mask, is_causal=True)


CACHES = ("cache", "past_key_values", "cache_params", "state")
"""What models call their parameter for a cache, and the field that returns it.

In transformers 5.24 it is "cache"; before, "past_key_values", and in Mamba "cache_params".
"""


def find_cache_name(module: nn.Module) -> str | None:
    """Return the name of a model's parameter for its cache; None if it takes no cache."""
    parameters = signature(module.forward).parameters
    return next((name for name in CACHES if name in parameters), None)


class HuggingFace(PlainAdapter):
    """A model of transformers, from tokens [b t] to the field `output` of what it returns.

    Args:
        given: name of its parameter for the input: "input_ids" for tokens [b t], "inputs_embeds"
            for their embeddings [b t d].
    """

    def __init__(
        self,
        module: nn.Module,
        output: int | str | None = "logits",
        given: str = "input_ids",
    ):
        super().__init__(module, output)
        self.given = given

    def call(self, x: Tensor) -> Any:
        """Return the model's output object, without a cache."""
        if "use_cache" in signature(self.module.forward).parameters:
            return self.module(**{self.given: x}, use_cache=False)
        return self.module(**{self.given: x})


class HuggingFaceDecoder(HuggingFace):
    """A model of transformers that goes on from its cache.

    Padding is left out by `attention_mask`, and counts no position if the model takes
    `position_ids`. The library supports padding on the left for decoders.

    Args:
        relative: whether only differences of positions count; None makes no claim.

    Raises:
        ValueError: for a model that takes no cache.
    """

    paddings = ("left",)

    def __init__(
        self,
        module: nn.Module,
        relative: bool | None = None,
        output: int | str | None = "logits",
        given: str = "input_ids",
    ):
        super().__init__(module, output, given)
        cache = find_cache_name(module)
        if cache is None:
            names = ", ".join(CACHES)
            raise ValueError(f"model={type(module).__name__}: takes no cache ({names})")
        self.cache = cache
        self.takes_positions = "position_ids" in signature(module.forward).parameters
        if relative is not None:
            self.relative = relative
        if cache == "state":
            # RWKV, the only model with a cache of this name, warns that it ignores the mask.
            self.paddings = ()

    def start(self, batch: int, position: int = 0) -> Carried:
        """Return the state before the first token.

        Raises:
            ValueError: for a position other than 0 if the model takes no positions.
        """
        if position and not self.takes_positions:
            raise ValueError(f"{position=} must be 0: this model takes no position_ids")
        return make_start_state(batch, position, next(self.module.parameters()).device)

    def prefill(
        self, x: Tensor, state: Carried | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Carried]:
        """Return the outputs of further tokens [b t], and the state after them."""
        before, kept = self.start(len(x)) if state is None else state, keep_all(x, keep)
        options = {}
        if before.held is not None:
            options[self.cache] = copy_state(before.held)
        mask = torch.cat([before.keep, kept], dim=1)
        if not mask.all():
            # A recurrent model, whose cache has no keys, takes the mask of the new tokens only.
            seen = kept if all(getattr(before.held, "is_linear", ())) else mask
            options["attention_mask"] = seen.long()
        if self.takes_positions and not (state is None and keep is None):
            counted = (kept.cumsum(1) - 1).clamp(min=0)
            options["position_ids"] = before.position[:, None] + counted
        found = self.module(**{self.given: x}, use_cache=True, **options)
        return self.take_sequence(found), extend_state(before, kept, found[self.cache])

    def step(self, x: Tensor, state: Carried) -> tuple[Tensor, Carried]:
        """Return the output of one further token [b], and the state after it."""
        y, state = self.prefill(x[:, None], state)
        return y[:, 0], state


class HuggingFaceLayer(PlainAdapter):
    """An attention or a block of a model of transformers, given what the model would give it.

    Args:
        masked: whether it takes a causal mask [1 1 t s], to be added to its scores.
        rotated: whether it takes rotations of its positions; they are computed by the
            RotaryEmbedding class in its own module, from its configuration.
    """

    def __init__(
        self,
        module: nn.Module,
        masked: bool = True,
        rotated: bool = True,
        output: int | str | None = None,
    ):
        super().__init__(module, output)
        self.masked, self.rotary = masked, None
        if rotated:
            beside = vars(sys.modules[type(module).__module__])
            rotary = next(cls for name, cls in beside.items() if name.endswith("RotaryEmbedding"))
            config = next(m.config for m in module.modules() if hasattr(m, "config"))
            self.rotary = rotary(config=config)

    def call(self, x: Tensor) -> Any:
        """Return what the layer returns at positions 0, 1, 2 …"""
        return self.module(x, **self.build_context(x))

    def build_context(self, x: Tensor) -> dict[str, Tensor]:
        """Return what its model would give the layer beside an input [b t d]."""
        t, options = x.shape[1], {}
        if self.rotary is not None:
            positions = torch.arange(t, device=x.device)[None]
            options["position_embeddings"] = self.rotary(x, positions)
        if self.masked:
            least = torch.finfo(x.dtype).min
            mask = torch.full((1, 1, t, t), least, dtype=x.dtype, device=x.device)
            options["attention_mask"] = mask.triu(1)
        return options

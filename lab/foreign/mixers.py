"""Mixers of transformers as classes of the lab: `lab mqar --model lab.foreign.mixers:Mamba`.

They train on any task from random weights. Each offers its matrix.
"""

from typing import Any

from torch import Tensor

from lab import peers
from lab.foreign.attention import IMPLEMENTATION, ForeignAttention, register_attention
from lab.foreign.mamba import ForeignMamba, ForeignMamba2
from lab.foreign.mixer import Call
from lab.laws.adapters import HuggingFaceLayer


class Llama(ForeignAttention):
    """The attention of transformers' Llama: rotary, without biases. [b t d] → [b t d].

    Args:
        d_model: width d.
        n_heads: heads of queries, d_model / n_heads wide.
        n_kv_heads: heads of keys and values, a divisor of n_heads; None: n_heads.

    Raises:
        ValueError: for widths that the heads do not divide.
    """

    def __init__(self, d_model: int, n_heads: int = 1, *, n_kv_heads: int | None = None):
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        if n_heads < 1 or d_model % (2 * n_heads):
            raise ValueError(f"{d_model=} must be a positive multiple of 2 · {n_heads=}")
        if n_kv_heads < 1 or n_heads % n_kv_heads:
            raise ValueError(f"{n_kv_heads=} must divide {n_heads=}")
        of = peers.load("transformers.models.llama.modeling_llama")
        register_attention()
        config = of.LlamaConfig(
            hidden_size=d_model, num_attention_heads=n_heads, num_key_value_heads=n_kv_heads
        )
        config._attn_implementation = IMPLEMENTATION
        super().__init__(of.LlamaAttention(config, 0))
        # The method alone: the layer's parameters are registered once.
        self._build_context = HuggingFaceLayer(self.module, masked=False).build_context

    def find_call(self, x: Tensor) -> Call:
        """Return the rotations of rows like x; without a mask the layer is causal by itself."""
        return Call((), self._build_context(x))


class Mamba(ForeignMamba):
    """The mixer of transformers' Mamba. [b t d] → [b t d].

    Args:
        d_model: width d.
        d_state: entries of the state of each channel.
        expand: channels per channel of the input.
        conv_width: tokens that the convolution sums over.

    Raises:
        ValueError: for a size below 1.
    """

    def __init__(self, d_model: int, *, d_state: int = 16, expand: int = 2, conv_width: int = 4):
        _require_positive(d_state=d_state, expand=expand, conv_width=conv_width)
        of = peers.load("transformers.models.mamba.modeling_mamba")
        config = of.MambaConfig(
            hidden_size=d_model, state_size=d_state, expand=expand, conv_kernel=conv_width
        )
        super().__init__(of.MambaMixer(config, 0))

    def find_call(self, x: Tensor) -> Call:
        """Return an empty call: the layer reads its input alone."""
        return Call((), {})


class Mamba2(ForeignMamba2):
    """The mixer of transformers' Mamba-2. [b t d] → [b t d].

    Args:
        d_model: width d.
        n_heads: heads, a divisor of expand · d_model.
        d_state: width of the state of each channel.
        expand: channels per channel of the input.
        conv_width: tokens that the convolution sums over.

    Raises:
        ValueError: for a size below 1, or heads that do not divide the width.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int = 1,
        *,
        d_state: int = 64,
        expand: int = 2,
        conv_width: int = 4,
    ):
        _require_positive(d_state=d_state, expand=expand, conv_width=conv_width, n_heads=n_heads)
        if expand * d_model % n_heads:
            raise ValueError(f"{n_heads=} must divide expand · d_model = {expand * d_model}")
        of = peers.load("transformers.models.mamba2.modeling_mamba2")
        config: Any = of.Mamba2Config(
            hidden_size=d_model,
            num_heads=n_heads,
            head_dim=expand * d_model // n_heads,
            state_size=d_state,
            expand=expand,
            conv_kernel=conv_width,
            n_groups=1,
        )
        super().__init__(of.Mamba2Mixer(config, 0))

    def find_call(self, x: Tensor) -> Call:
        """Return an empty call: the layer reads its input alone."""
        return Call((), {})


def _require_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")

"""A model's sizes, by the names that TransformerLens gives them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import nn

from lab.layers.mlp import MLP

if TYPE_CHECKING:
    from lab.models.language_model import LanguageModel

Size = TypeVar("Size")


@dataclass(frozen=True)
class ModelSizes:
    """What `model.cfg` holds; read from the layers, so it is also true of a model built by hand.

    Attributes:
        n_layers: blocks.
        d_model: width of the residual stream.
        d_vocab: tokens; 0 of a model that reads vectors.
        n_heads: heads of every mixer; None where mixers differ or do not say.
        d_head: d_model / n_heads, or what an opened model says; None without n_heads.
        d_mlp: hidden width of every MLP; None where they differ, or one is missing or not known.
        attn_only: whether no block has a state transform.
        normalization_type: of the last norm: "RMS", "LN", or None where there is none. The lab's
            own models have "RMS".
        final_factor: fixed factor on the logits.
        dtype: of the weights.
        device: of the weights.
    """

    n_layers: int
    d_model: int
    d_vocab: int
    n_heads: int | None
    d_head: int | None
    d_mlp: int | None
    attn_only: bool
    normalization_type: Literal["RMS", "LN"] | None
    final_factor: float
    dtype: torch.dtype
    device: torch.device


def read_sizes(model: "LanguageModel") -> ModelSizes:
    """Return a model's sizes."""
    tokens = isinstance(model.embed, nn.Embedding)
    d_vocab, d_model = model.embed.weight.shape if tokens else (0, model.embed.weight.shape[0])
    mixers = [block.mixer for block in model.blocks if block.mixer is not None]
    mlps = [block.mlp for block in model.blocks]
    n_heads = find_common(getattr(mixer, "n_heads", None) for mixer in mixers)
    d_mlp = find_common(mlp.up.out_features if isinstance(mlp, MLP) else None for mlp in mlps)
    return ModelSizes(
        n_layers=len(model.blocks),
        d_model=d_model,
        d_vocab=d_vocab,
        n_heads=n_heads,
        d_head=None if n_heads is None else d_model // n_heads,
        d_mlp=d_mlp,
        attn_only=not any(mlps),
        normalization_type="RMS",
        final_factor=model.norm_final.factor,
        dtype=model.embed.weight.dtype,
        device=model.embed.weight.device,
    )


def find_common(values: Iterable[Size | None]) -> Size | None:
    """Return the value that all share; None where they differ or there are none."""
    found = set(values)
    return found.pop() if len(found) == 1 else None

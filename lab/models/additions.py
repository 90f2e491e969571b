"""What each half of a block adds to the residual stream."""

from collections.abc import Mapping
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from lab.models.block import Block

Half = Literal["attn", "mlp"]
ENDS = {"attn": ("pre", "mid"), "mlp": ("mid", "post")}
"""Where the residual stream stands before and after each half."""


def read_added(
    tensors: Mapping[str, Tensor], block: Block, layer: int, half: Half
) -> Float[Tensor, "b t d"]:
    """Return what a half of a block adds to the residual stream.

    That is what it returns, unless the block changes that by a norm or a factor before it adds it:
    then it is the difference that it makes to the stream.

    Raises:
        ValueError: for a block that does so and has no point between its halves, or several
            residual streams.
    """
    if block.adds_outputs:
        return tensors[f"blocks.{layer}.hook_{half}_out"]
    before, after = (f"blocks.{layer}.hook_resid_{end}" for end in ENDS[half])
    if tensors[f"blocks.{layer}.hook_resid_pre"].ndim != 3:
        raise ValueError(f"block {layer} has several residual streams, must have one [b t d]")
    if not hasattr(block, "hook_resid_mid"):
        raise ValueError(
            f"block {layer} does not add what its mixer and its MLP return, and has no hook point "
            "between them, so what each adds is not known"
        )
    return tensors[after] - tensors[before]

"""What each head of a mixer adds to the residual stream."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from lab.layers.mixer import MatrixMixer
from lab.models.additions import read_added

if TYPE_CHECKING:
    from lab.models.activation_cache import ActivationCache


@torch.no_grad()
def split_heads(cache: "ActivationCache", layer: int) -> Mapping[str, Float[Tensor, "b t d"]]:
    """Return what a mixer's heads added, by names such as "L0H1".

    Head i adds project(x, z_i) − project(x, 0), where z_i is z with all other heads at 0;
    project(x, 0), unless it is 0, is "L0rest". Where that does not add up to what the block adds of
    the mixer, or the mixer names no heads, this counts as that of one head, "L0".
    """
    block = cache.model.list_blocks()[layer]
    added = read_added(cache, block, layer, "attn")
    mixer = block.mixer
    if not isinstance(mixer, MatrixMixer) or mixer.heads_hook is None or block.norm_mixer is None:
        return {f"L{layer}": added}
    x = block.norm_mixer(cache["resid_pre", layer])
    z = cache[f"blocks.{layer}.mixer.{mixer.heads_hook}"].transpose(1, 2)
    rest = mixer.project(x, torch.zeros_like(z))
    found = {}
    for head in range(z.shape[1]):
        alone = torch.zeros_like(z)
        alone[:, head] = z[:, head]
        found[f"L{layer}H{head}"] = mixer.project(x, alone) - rest
    off = (sum(found.values(), start=rest) - added).norm()
    if not off <= torch.finfo(added.dtype).eps ** 0.5 * added.norm():
        return {f"L{layer}": added}
    return {**found, f"L{layer}rest": rest} if rest.any() else found

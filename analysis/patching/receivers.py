"""What reads the residual stream: inputs of heads, other mixers, state transforms, the logits."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from lab.layers.mixer import SplitInputMixer
from lab.models import LanguageModel
from lab.models.activation_cache import ActivationCache
from lab.models.user_mixer import is_from_lab


@dataclass(frozen=True)
class Receiver:
    """What reads the residual stream.

    Attributes:
        name: as in `EdgeEffects`.
        order: how many halves of blocks come before it.
        residual: the point of the residual stream that it reads.
        point: the point of what it makes of it; None for the logits.
        head: index along the axis h of the point; None: all of it.
    """

    name: str
    order: int
    residual: str
    point: str | None
    head: int | None = None


def list_receivers(model: LanguageModel, cache: ActivationCache) -> list[Receiver]:
    """Return what reads the residual stream, in the order of the forward pass."""
    found = []
    for layer, block in enumerate(model.list_blocks()):
        way = f"blocks.{layer}"
        if block.mixer is not None:
            whole = Receiver(f"L{layer}", 2 * layer + 1, f"{way}.hook_resid_pre", "")
            found += _split_receiver(whole, block.mixer, cache, way)
        if block.mlp is not None:
            residual, point = f"{way}.hook_resid_mid", f"{way}.hook_mlp_out"
            found.append(Receiver(f"M{layer}", 2 * layer + 2, residual, point))
    last = len(model.blocks)
    residual = f"blocks.{last - 1}.hook_resid_post"
    return [*found, Receiver("logits", 2 * last + 1, residual, None)]


def _split_receiver(
    whole: Receiver, mixer: nn.Module, cache: ActivationCache, way: str
) -> Iterator[Receiver]:
    """Yield the inputs of each head where the mixer names them, else the mixer as a whole."""
    # A user's class may read x in further ways, whatever it inherits.
    if not (isinstance(mixer, SplitInputMixer) and is_from_lab(mixer)):
        yield Receiver(whole.name, whole.order, whole.residual, f"{way}.hook_attn_out")
        return
    for hook in mixer.input_hooks:
        point = f"{way}.mixer.{hook}"
        for head in range(cache[point].shape[2]):
            name = f"{whole.name}H{head}.{hook.removeprefix('hook_')}"
            yield Receiver(name, whole.order, whole.residual, point, head)

"""Copy strings of one length: attention looks back that many tokens, whatever they are."""

import torch

from lab.constructions import gather, heads
from lab.constructions.cannot import CannotError
from lab.constructions.capacity import check_bits
from lab.constructions.codes import spread
from lab.constructions.residual import ANSWER_SIZE, Residual, read_answers, write_tokens
from lab.layers.attention import Attention
from lab.layers.ssd import SSD
from lab.models import LanguageModel


def solve(model: LanguageModel, length: int, seq_len: int, bits: float) -> None:
    """Let the last attention layer that can do so copy the token `length` positions earlier.

    Args:
        model: whose weights are set.
        length: tokens of every string.
        seq_len: T.
        bits: log₂ of how many strings there are.

    Raises:
        CannotError: when none singles that distance out, or there is only SSD.
    """
    mixers = [block.mixer for block in model.list_blocks()]
    attentions = [mixer for mixer in mixers if isinstance(mixer, Attention)]
    check_bits(model, bits, f"strings of {length} tokens")
    if not attentions:
        raise _refuse_delay(model, length)
    refusals = []
    for attention in reversed(attentions):
        try:
            return _bring(model, attention, length, seq_len)
        except CannotError as refusal:
            refusals.append(refusal)
    raise refusals[0]


def _bring(model: LanguageModel, attention: Attention, length: int, seq_len: int) -> None:
    v, d = model.embed.weight.shape
    width = min(v, d - 2, heads.count_room(attention))
    if width < 2:
        raise CannotError(f"d_model={d}: leaves {max(width, 0)} channels for {v} tokens")
    codes, channels = spread(v, width), slice(2, 2 + width)
    residual = Residual(
        d_model=d,
        kind=torch.zeros(v).double(),
        key=channels,
        gathered=channels,
        answer=channels,
        keys=codes,
        answers=codes,
    )
    gather.look_back(attention, residual, channels, channels, length, seq_len, ANSWER_SIZE)
    write_tokens(model, residual)
    read_answers(model, residual, ANSWER_SIZE - 1, residual.energy)


def _refuse_delay(model: LanguageModel, length: int) -> CannotError:
    """Return the refusal for a stack without attention."""
    ranks = [
        block.mixer.B_proj.out_features // block.mixer.n_groups * block.mixer.n_heads
        for block in model.list_blocks()
        if isinstance(block.mixer, SSD)
    ]
    return CannotError(
        f"to delay by {length} tokens takes a matrix of rank {length}, and one SSD has at most "
        f"{max(ranks)} = n_heads · d_state beyond its convolution; rotations of fixed "
        "wavelengths make no sharp delay; attention would work"
    )

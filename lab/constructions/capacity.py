"""How much a recurrent state can hold: what no setting of weights gets around."""

import math

from lab.constructions.cannot import CannotError
from lab.layers.ssd import SSD
from lab.models.language_model import Block, LanguageModel

BITS = 32
"""Of a number in fp32."""


def check_bits(model: LanguageModel, wanted: float, what: str) -> None:
    """Hold the states of a stack of SSD alone to telling apart what a row may ask for.

    All that a later token knows of earlier ones passes through them; so 2^held states answer at
    most that many different ways.

    Args:
        model: with any mixers; others than SSD know all tokens, and nothing is held against them.
        wanted: log₂ of how many answers to the same questions there are.
        what: they are, for the message.

    Raises:
        CannotError: where the states are too small, or there is no mixer at all.
    """
    held = 0
    for block in model.blocks:
        assert isinstance(block, Block)
        if block.mixer is None:
            continue
        if not isinstance(block.mixer, SSD):
            return
        ssd = block.mixer
        held += ssd.x_proj.out_features * (ssd.B_proj.out_features // ssd.n_groups)
        if ssd.conv is not None:
            held += ssd.conv.weight.shape[0] * (ssd.conv.width - 1)
    if not held:
        raise CannotError("no mixer in the stack: a position knows of no other", proven=True)
    if held * BITS < wanted:
        raise CannotError(
            f"the states hold {held} numbers of {BITS} bits, and {what} take {wanted:.0f} bits; "
            "a larger d_state would do",
            proven=True,
        )


def count_arrangement_bits(n: int, k: int) -> float:
    """Return log₂ of how many ways there are to pick k of n things in order."""
    return (math.lgamma(n + 1) - math.lgamma(n - k + 1)) / math.log(2)

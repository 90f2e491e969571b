"""How much a recurrent state can hold: a bound that applies to all weights."""

import math

from lab.constructions.cannot import CannotError
from lab.layers.ssd import SSD
from lab.models import LanguageModel

BITS = 32
"""Bits of a number in fp32."""


def check_bits(model: LanguageModel, wanted: float, what: str) -> None:
    """Check that the states of a stack of SSD layers can distinguish all answers of a row.

    A later token knows of earlier ones only what the states hold, so states of n bits lead to at
    most 2ⁿ different answers.

    Args:
        model: with any mixers. Only stacks of SSD alone are checked: other mixers see all tokens.
        wanted: log₂ of how many answers to the same questions there are.
        what: the name of these answers, for the message.

    Raises:
        CannotError: when the states are too small, or there is no mixer at all.
    """
    held = 0
    for block in model.list_blocks():
        if block.mixer is None:
            continue
        if not isinstance(block.mixer, SSD):
            return
        ssd = block.mixer
        held += ssd.x_proj.out_features * (ssd.B_proj.out_features // ssd.n_groups)
        if ssd.conv is not None:
            held += ssd.conv.weight.shape[0] * (ssd.conv.width - 1)
    if not held:
        raise CannotError("no mixer in the stack: no position sees another", proven=True)
    if held * BITS < wanted:
        raise CannotError(
            f"the states hold {held} numbers of {BITS} bits, and {what} take {wanted:.0f} bits; "
            "a larger d_state would work",
            proven=True,
        )


def count_arrangement_bits(n: int, k: int) -> float:
    """Return log₂ of the number of ordered choices of k out of n things."""
    return (math.lgamma(n + 1) - math.lgamma(n - k + 1)) / math.log(2)

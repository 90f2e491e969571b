"""What cannot be constructed: the error that says so, and how much a recurrent state can hold."""

import math
from typing import Literal

from lab.layers.ssd import SSD
from lab.models import LanguageModel

BITS = 32
"""Bits of a number in fp32."""


class CannotError(ValueError):
    """There is no construction: the model cannot solve the task, or nobody has built one for it.

    Attributes:
        reason: one clause, without the outcome.
        proven: whether the reason holds for all weights. False where it holds for this construction
            only, so that another one might work.
    """

    def __init__(self, reason: str, *, proven: bool = False):
        said = (
            "no weights solve the task in this model"
            if proven
            else "no weights set by hand are known for this model"
        )
        super().__init__(f"{said}: {reason}")
        self.reason = reason
        self.proven = proven

    @property
    def outcome(self) -> Literal["cannot", "not built"]:
        """What the reason holds for: all weights ("cannot"), or this construction ("not built")."""
        return "cannot" if self.proven else "not built"


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

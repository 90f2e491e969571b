"""Setting the weights of SSD states: values that carry channels, constant steps, B and C."""

import math

import torch
from torch import Tensor

from lab.constructions.cannot import CannotError
from lab.constructions.residual import ANSWER_SIZE, CONSTANT, Residual
from lab.layers.ssd import SSD

GATE = 2.0
"""Input of an open gate, before its SiLU."""
SMALL = 0.02
"""Scale of values before a convolution's SiLU, which is z/2 for small z."""
STEP = math.log(math.e - 1)
"""Input at which softplus is one, the dt of every token."""


def silu(z: float) -> float:
    """Return z σ(z)."""
    return z / (1 + math.exp(-z))


def count_room(ssd: SSD) -> int:
    """Return the most channels that a layer's values can carry."""
    return ssd.x_proj.out_features


@torch.no_grad()
def carry(ssd: SSD, source: slice, into: slice, what: str, amount: float = 1.0) -> None:
    """Make the values the channels `source`, output into `into` with a factor `amount`.

    Raises:
        CannotError: when values are too narrow.
    """
    channels = list(range(source.start, source.stop))
    if len(channels) > count_room(ssd):
        raise CannotError(
            f"to {what} {len(channels)} channels: d_inner={count_room(ssd)} is too narrow"
        )
    places = list(range(len(channels)))
    if ssd.norm_weight is not None:
        # Other channels would contribute to the norm.
        ssd.x_proj.weight.zero_()
        ssd.norm_weight.fill_(1)
        if ssd.conv is not None:
            ssd.conv.bias[: count_room(ssd)] = 0
    ssd.x_proj.weight[places] = 0
    ssd.x_proj.weight[places, channels] = SMALL if ssd.conv is not None else 1.0
    if ssd.conv is not None:
        # A SiLU of small values halves them; a norm does not mind.
        amount *= 1 if ssd.norm_weight is not None else 2 / SMALL
        ssd.conv.weight[places] = 0
        ssd.conv.bias[places] = 0
        ssd.conv.weight[places, -1] = 1
    ssd.out_proj.weight[list(range(into.start, into.stop)), places] = amount


@torch.no_grad()
def carry_one(ssd: SSD, source: int, into: int, place: int, amount: float) -> None:
    """Make one more value a channel of the stream, in a layer without a convolution."""
    ssd.x_proj.weight[place] = 0
    ssd.x_proj.weight[place, source] = 1.0
    ssd.out_proj.weight[into, place] = amount


@torch.no_grad()
def open_gate(ssd: SSD, constant: float) -> float:
    """Make the gate equal for all tokens and return it; `constant` is their constant channel."""
    if ssd.z_proj is None:
        return 1.0
    ssd.z_proj.weight.zero_()
    ssd.z_proj.weight[:, CONSTANT] = GATE / constant
    return silu(GATE)


def find_normed_amount(ssd: SSD, residual: Residual) -> float:
    """Return the factor that makes a gated norm's output, of length √width, an answer.

    Raises:
        CannotError: for several parts.
    """
    assert ssd.norm_weight is not None
    if ssd.n_groups > 1:
        raise CannotError(
            f"S.n_groups={ssd.n_groups} does not work with gate=norm, which normalises "
            "each group by itself"
        )
    return ANSWER_SIZE * residual.unit / (len(ssd.norm_weight) // ssd.n_groups) ** 0.5


@torch.no_grad()
def shift_values(ssd: SSD, tokens: int) -> None:
    """Delay the values by some tokens.

    Raises:
        CannotError: for a convolution that does not reach back so far.
    """
    assert ssd.conv is not None
    check_taps(ssd, tokens)
    values = slice(0, ssd.x_proj.out_features)
    ssd.conv.weight[values] = 0
    ssd.conv.weight[values, -1 - tokens] = 1


def check_taps(ssd: SSD, tokens: int) -> None:
    """Check that a convolution reaches back far enough.

    Raises:
        CannotError: when it does not.
    """
    assert ssd.conv is not None
    if ssd.conv.width <= tokens:
        raise CannotError(
            f"S.conv_width={ssd.conv.width}: the convolution sees no token before; "
            f"conv_width={tokens + 1} would work",
            proven=True,
        )


@torch.no_grad()
def keep_time(ssd: SSD, constant: float, fade: float) -> None:
    """Let every token take one step, dt = 1, and lose `fade` nats in it."""
    ssd.dt_proj.weight.zero_()
    if ssd.dt_proj.bias is not None:
        ssd.dt_proj.bias.fill_(STEP)
    else:
        ssd.dt_proj.weight[:, CONSTANT] = STEP / constant
    if ssd.A_log is not None:
        ssd.A_log.fill_(math.log(fade))


@torch.no_grad()
def clear(ssd: SSD) -> None:
    """Set B and C to zero, before scores are added."""
    for weight in (ssd.B_proj.weight, ssd.C_proj.weight):
        weight.zero_()
    if ssd.conv is not None:
        reads = slice(ssd.x_proj.out_features, None)
        ssd.conv.bias[reads] = 0
        ssd.conv.weight[reads] = 0
        ssd.conv.weight[reads, -1] = 1


@torch.no_grad()
def add_score(ssd: SSD, place: int, read: tuple[int, float], write: tuple[int, float]) -> None:
    """Let C read a channel of the stream, and B another, in one channel of every group's state."""
    for row in list_rows(ssd, place):
        ssd.C_proj.weight[row, read[0]] = read[1]
        ssd.B_proj.weight[row, write[0]] = write[1]


def list_rows(ssd: SSD, place: int) -> list[int]:
    """Return the rows of B and C for one channel of each group's state."""
    width = ssd.B_proj.out_features // ssd.n_groups
    return [group * width + place for group in range(ssd.n_groups)]


@torch.no_grad()
def add_constant_score(ssd: SSD) -> None:
    """Make B and C one in the first channel of the state, by the convolution's bias."""
    assert ssd.conv is not None
    one = 1.2784645  # SiLU(z) = 1
    for bias in (get_write_part(ssd, ssd.conv.bias), get_read_part(ssd, ssd.conv.bias)):
        bias[list_rows(ssd, 0)] = one


def get_write_part(ssd: SSD, joint: Tensor) -> Tensor:
    """Return B's part of the convolution's weight or bias."""
    return joint[ssd.x_proj.out_features :][: ssd.B_proj.out_features]


def get_read_part(ssd: SSD, joint: Tensor) -> Tensor:
    """Return C's part of the convolution's weight or bias."""
    return joint[ssd.x_proj.out_features + ssd.B_proj.out_features :]

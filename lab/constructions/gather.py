"""Copy into each token the key of the token before it, or of a token at a fixed distance."""

import math

import torch

from lab.constructions import heads, states
from lab.constructions.cannot import CannotError
from lab.constructions.codes import Channels, find_channels
from lab.constructions.residual import CONSTANT, KIND, SEEN, Residual
from lab.layers.attention import Attention
from lab.layers.ssd import SSD

FADE = 4.0
"""Nats that a gathering state loses per token: the second to last weighs e^−4 of the last."""
FADE_WITHOUT_SKIP = 3.0
"""The same without a skip that subtracts the own token, which weighs e^FADE. It is less, so that
the own token contributes less to the norm's divisor."""


def gather(mixer: Attention | SSD, residual: Residual, seq_len: int) -> float:
    """Gather the previous token's key; return how much of the token's own key is added to it.

    Raises:
        CannotError: when the mixer cannot single out the previous token, or carries too little.
    """
    if isinstance(mixer, Attention):
        look_back(mixer, residual, residual.key, residual.gathered, 1, seq_len)
        return 0.0
    return _fade(mixer, residual)


@torch.no_grad()
def look_back(
    attention: Attention,
    residual: Residual,
    source: slice,
    into: slice,
    offset: int,
    seq_len: int,
    amount: float = 1.0,
) -> None:
    """Copy channels from `offset` tokens earlier, which the rotation alone singles out.

    Queries and keys are constant, so the score at distance l is g² Σ_m cos θ_m (l − offset) over
    the fastest pairs m, which is largest at l = offset. Positions before `offset` copy some other
    token.
    """
    if attention.position != "rope":
        raise CannotError(
            "position=none: without rotation a layer reads its past as a set, in no order; "
            "whether a second layer could recover the order from means over ever longer pasts "
            "is an open question; position=rope would work"
        )
    channels = find_channels(attention)
    pairs, margin = _choose_fastest(channels, offset, seq_len)
    score = heads.find_needed_score(
        margin, seq_len, f"to look {offset} tokens back by {channels.what}"
    )
    heads.check_open(attention, seq_len)
    constant = residual.scale_by_norm(0)
    gain = (score * channels.width**0.5 / pairs) ** 0.5 / constant
    used = heads.carry(attention, source, into, amount)
    heads.clear(attention, used)
    for m in range(pairs):
        first, second = channels.pair(m)
        angle = offset * channels.theta(m)
        heads.add_score(
            attention, used, first, (CONSTANT, gain), (CONSTANT, gain * math.cos(angle))
        )
        heads.add_score(
            attention, used, second, (CONSTANT, 0.0), (CONSTANT, gain * math.sin(angle))
        )


def _choose_fastest(channels: Channels, offset: int, seq_len: int) -> tuple[int, float]:
    """Return how many of the fastest pairs single out a distance best, and by what margin."""
    lags = torch.arange(seq_len, dtype=torch.float64)
    theta = torch.tensor([channels.theta(m) for m in range(channels.width // 2)]).double()
    cosines = ((lags[:, None] - offset) * theta).cos().cumsum(1)
    means = cosines / torch.arange(1, len(theta) + 1)
    means[offset : offset + 1] = -1
    margins = 1 - means.amax(0)
    return int(margins.argmax()) + 1, margins.max().item()


@torch.no_grad()
def _fade(ssd: SSD, residual: Residual) -> float:
    """Gather by a state that fades fast; the skip subtracts the own token."""
    if ssd.norm_weight is not None:
        raise CannotError("S.gate=norm does not work in a layer that gathers; none or silu would")
    if ssd.position == "none":
        raise CannotError(
            "S.position=none: without decay, rotation or convolution a layer sums its past in "
            "no order; whether deeper stacks could count is an open question; "
            "position=rope, decay or conv would work"
        )
    constant = residual.scale_by_norm(0)
    gate = states.open_gate(ssd, constant)
    states.carry(ssd, residual.key, residual.gathered, "gather", 1 / gate)
    if residual.marks_first:
        place = residual.key.stop - residual.key.start
        states.carry_one(ssd, CONSTANT, KIND, place, -SEEN / (gate * _sum_weights(ssd)))
    if ssd.position == "conv":
        return _shift(ssd, residual)
    channels = find_channels(ssd)
    # On the slowest pair, rotated so that its product is largest at a distance of one.
    m = channels.width // 2 - 1
    theta = channels.theta(m)
    first, second = channels.pair(m) if ssd.position == "rope" else (0, 0)
    fade = FADE if ssd.D is not None else FADE_WITHOUT_SKIP
    size = math.exp(fade)
    states.keep_time(ssd, constant, fade)
    states.clear(ssd)
    states.add_score(
        ssd, first, (CONSTANT, 1 / constant), (CONSTANT, size * math.cos(theta) / constant)
    )
    if second != first:
        states.add_score(
            ssd, second, (CONSTANT, 0.0), (CONSTANT, size * math.sin(theta) / constant)
        )
    own = size * math.cos(theta)
    if residual.gathered == residual.key:
        # Answers have no key of their own, and tokens with a key do not read.
        for place in {first, second}:
            _read_if_answer(ssd, place, residual)
        if ssd.D is not None:
            ssd.D.zero_()
        return 0.0
    if ssd.D is None:
        return own
    ssd.D.fill_(-own)
    return 0.0


@torch.no_grad()
def _read_if_answer(ssd: SSD, place: int, residual: Residual) -> None:
    """Keep C for tokens of the higher kind, and make it zero for those of the lower kind."""
    high, low = residual.kind.max().item(), residual.kind.min().item()
    for row in states.list_rows(ssd, place):
        whole = ssd.C_proj.weight[row, CONSTANT].item()
        ssd.C_proj.weight[row, CONSTANT] = -whole * low / (high - low)
        ssd.C_proj.weight[row, KIND] = whole / (high - low)


def _sum_weights(ssd: SSD) -> float:
    """Return the sum of the weights of all earlier tokens, of which the last has weight one."""
    fade = FADE if ssd.D is not None else FADE_WITHOUT_SKIP
    return 1 / (1 - math.exp(-fade))


def _shift(ssd: SSD, residual: Residual) -> float:
    """Gather by the convolution, which delays values by one token; the state passes them on."""
    states.shift_values(ssd, 1)
    states.keep_time(ssd, residual.scale_by_norm(0), 12.0)
    states.clear(ssd)
    if ssd.D is not None:
        ssd.D.fill_(1)
    else:
        states.add_constant_score(ssd)
    return 0.0

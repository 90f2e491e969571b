"""Parity of every prefix, the word problem of Z2: an SSD counts, an MLP maps the count to parity.

Exact in fp32. bf16 rounds counts above 2⁸ to even numbers, and the MLP's sums sooner.
"""

import torch
from torch import nn

from lab.constructions import states
from lab.constructions.cannot import CannotError, check_bits
from lab.constructions.codes import find_channels
from lab.constructions.residual import (
    ANSWER_SIZE,
    CONSTANT,
    Residual,
    read_answers,
    write_tokens,
)
from lab.layers.cdmoe import CDMoE
from lab.layers.mlp import MLP
from lab.layers.routed import SharedExpertMoE
from lab.layers.ssd import SSD
from lab.models import LanguageModel
from tasks.word_problem import count_residues

COUNT = 5
"""Channel of the count, after the constant, the kind, the two tokens' channels and the answer."""
TOLERANCE = 0.1
"""Maximum amount by which a count may fall short at the end of a row."""
STEEP = 10.0
"""Input of a hidden unit at a count of one above its kink; there SiLU and GELU differ from ReLU by
less than 5e-4."""


def solve(model: LanguageModel, groups: set[str], seq_len: int) -> None:
    """Set the weights.

    Raises:
        CannotError: for other groups, for softmax attention alone, and for rows too long for the
            MLP or the state's rotation.
    """
    check_bits(model, 1.0, "the products of a prefix")
    ssds = _find_ssds(model)
    if groups != {"Z2"}:
        raise CannotError(_explain_group(groups))
    mlp = _find_mlp_behind(model, ssds[0])
    width = model.embed.weight.shape[1]
    if width <= COUNT:
        raise CannotError(f"d_model={width}: {COUNT + 1} channels are needed")
    ssd = ssds[0]
    if seq_len + 1 > mlp.up.out_features:
        raise CannotError(
            f"d_ff={mlp.up.out_features}: the parity of a count changes at every count up to "
            f"seq_len={seq_len}, which takes d_ff ≥ {seq_len + 1}"
        )
    residual = Residual(
        d_model=width,
        kind=torch.zeros(2).double(),
        key=slice(2, 4),
        gathered=slice(COUNT, COUNT + 1),
        answer=slice(4, 5),
        keys=torch.eye(2).double(),
        answers=torch.tensor([[-1.0], [1.0]]).double(),
    )
    _count(ssd, residual, seq_len)
    _bend(mlp, residual, seq_len)
    write_tokens(model, residual)
    read_answers(model, residual, ANSWER_SIZE - 1, residual.energy + 1)


def _explain_group(groups: set[str]) -> str:
    names = ", ".join(sorted(groups))
    if all(count_residues(group) for group in groups):
        return f"group={names}: the MLP would have to bend a sum of residues"
    if not groups & {"A5", "S5"}:
        return f"group={names}: solvable, but products of permutations are not set by hand"
    return (
        f"group={names}: the word problem of A5 or S5 is complete for NC1 (Barrington "
        "1989), and a model of constant depth and log precision in TC0 cannot solve it at every "
        "length unless TC0 = NC1"
    )


def _find_ssds(model: LanguageModel) -> list[SSD]:
    """Return the SSDs of the stack.

    Raises:
        CannotError: when there is none, whatever the group.
    """
    mixers = [block.mixer for block in model.list_blocks()]
    ssds = [mixer for mixer in mixers if isinstance(mixer, SSD)]
    if not ssds:
        raise CannotError(
            "on a row of equal tokens, softmax attention averages equal values, at any depth and "
            "under any mask or rotation, so all positions give one answer; but the right answers, "
            "the powers of an element, differ; an SSD would work for Z2",
            proven=True,
        )
    return ssds


def _find_mlp_behind(model: LanguageModel, ssd: SSD) -> MLP:
    """Return the first MLP that reads the output of an SSD.

    Raises:
        CannotError: when there is none.
    """
    blocks = model.list_blocks()
    first = next(i for i, block in enumerate(blocks) if block.mixer is ssd)
    mlp = next(
        (m for m in (_find_mlp(block.mlp) for block in blocks[first:]) if m is not None), None
    )
    if mlp is None:
        raise CannotError(
            "no MLP behind the SSD: decays are positive and flip no sign, so that at "
            "finite precision no such model has parity at every length (Sarrof et al. 2024; "
            "Grazzi et al. 2024), and up to a length only by bending a count; SM would work"
        )
    return mlp


def _find_mlp(transform: nn.Module | None) -> MLP | None:
    """Return the MLP of a state transform that every token passes, if it has one."""
    if isinstance(transform, MLP):
        return transform
    if isinstance(transform, CDMoE):
        return transform.cross_domain
    if isinstance(transform, SharedExpertMoE):
        return transform.shared
    return None


@torch.no_grad()
def _count(ssd: SSD, residual: Residual, seq_len: int) -> None:
    """Sum the ones so far, each as 1/T, so that the norm's divisor hardly changes."""
    if ssd.norm_weight is not None:
        raise CannotError("S.gate=norm: the norm divides the count out; none or silu would work")
    channels = find_channels(ssd)
    m = channels.width // 2 - 1
    lost = seq_len * (channels.theta(m) * seq_len) ** 2 / 6
    if lost > TOLERANCE:
        raise CannotError(
            f"seq_len={seq_len}: the slowest pair of {channels.what} turns so far that {lost:.2g} "
            "ones of a row are lost; position=none, decay, conv or a larger rope_base would work"
        )
    constant = residual.scale_by_norm(0)
    gate = states.open_gate(ssd, constant)
    # Half of the tolerance, over the whole row.
    states.keep_time(ssd, constant, TOLERANCE / seq_len**2)
    states.clear(ssd)
    one = slice(residual.key.start + 1, residual.key.start + 2)
    amount = 1 / (gate * seq_len)
    if ssd.conv is not None:
        # Exact SiLU: an error of half a percent per token would be one too many after two hundred.
        small = states.SMALL * constant
        amount *= small / 2 / states.silu(small)
    states.carry(ssd, one, slice(COUNT, COUNT + 1), "count", amount)
    if ssd.conv is not None:
        states.add_constant_score(ssd)
    else:
        place = channels.pair(m)[0] if ssd.position == "rope" else 0
        states.add_score(ssd, place, (CONSTANT, 1 / constant), (CONSTANT, 1 / constant))
    if ssd.D is not None:
        ssd.D.zero_()


@torch.no_grad()
def _bend(mlp: MLP, residual: Residual, seq_len: int) -> None:
    """Map even counts to −1 and odd ones to 1, by a line that bends at each whole number.

    Hidden unit i is ReLU(N − k) with k = i − 1; the one of k = −1 starts the line. The norm's
    divisor scales all of them alike.
    """
    least = residual.scale_by_norm(1)
    gain = STEEP / least
    kinks = torch.arange(-1, seq_len)
    bends = torch.where(kinks % 2 == 0, 4.0, -4.0)
    # From 0 at −1 down to −1 at 0, then up and down by two.
    bends[0], bends[1] = -1.0, 3.0
    units = slice(0, len(kinks))
    sloping = mlp.up if mlp.gate is None else mlp.gate
    sloping.weight[units] = 0
    sloping.weight[units, COUNT] = gain * seq_len
    sloping.weight[units, CONSTANT] = -gain * kinks.to(sloping.weight)
    if mlp.gate is not None:
        mlp.up.weight[units] = 0
        mlp.up.weight[units, CONSTANT] = 1 / least
    size = ANSWER_SIZE * residual.unit / (gain * least)
    mlp.down.weight[residual.answer.start, units] = size * bends.to(mlp.down.weight)

"""The residual stream: what each channel holds, how tokens enter and how answers leave."""

from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int64
from torch import Tensor, nn

from lab.constructions.cannot import CannotError
from lab.layers.attention import Attention
from lab.layers.cdmoe import CDMoE
from lab.layers.mlp import MLP
from lab.layers.peer import PEER
from lab.layers.routed import RoutedMoE, SharedExpertMoE
from lab.layers.ssd import SSD
from lab.models import LanguageModel

CONSTANT, KIND = 0, 1
"""The first two channels: one is equal for all tokens, so that a norm's divisor is known, and one
distinguishes two kinds of tokens."""
SEEN = 0.5
"""What every token but a row's first loses in `KIND`, where the first must be recognised."""
ANSWER_SIZE = 4.0
"""Length of a fetched answer, where a token's code has length one."""
LOSS = 0.005
"""Loss of right answers in nats: small, but not zero, so that there is a gradient."""
SAMPLE = 32
"""Answers for which the loss is computed."""


@dataclass(frozen=True)
class Residual:
    """Channels and codes. A token is unit · (1, kind, key's code, 0, answer's code).

    All tokens have the same length, √d_model, so that the first norm changes nothing.

    Attributes:
        d_model: width.
        kind: of each token, [v].
        key, gathered, answer: channels of a key's code, of the key gathered from the token before,
            and of an answer's code. Key and answer may be the same, and so may key and gathered
            where only answers gather, which are not keys.
        keys: each token's key code, unit or zero, [v a].
        answers: each token's answer code, unit or zero, [v b].
        marks_first: whether gathering takes `SEEN` off the kind of all tokens but a row's first.
    """

    d_model: int
    kind: Float64[Tensor, " v"]
    key: slice
    gathered: slice
    answer: slice
    keys: Float64[Tensor, "v a"]
    answers: Float64[Tensor, "v b"]
    marks_first: bool = False

    @property
    def energy(self) -> float:
        """A token's squared length, in units."""
        own = 1 + self.kind.square() + self.answers.square().sum(1)
        if self.key != self.answer:
            own = own + self.keys.square().sum(1)
        assert own.max() - own.min() < 1e-9, "tokens of several lengths"
        return own[0].item()

    @property
    def unit(self) -> float:
        """Length in the residual stream of a code of length one."""
        return (self.d_model / self.energy) ** 0.5

    def scale_by_norm(self, added: int | float) -> float:
        """Return what one unit becomes in a norm when a token has `added` more squared units."""
        return (self.d_model / (self.energy + added)) ** 0.5

    def build_table(self) -> Float64[Tensor, "v d"]:
        """Return the embedding table."""
        table = self.keys.new_zeros(len(self.kind), self.d_model)
        table[:, CONSTANT], table[:, KIND] = 1, self.kind
        table[:, self.key], table[:, self.answer] = self.keys, self.answers
        if self.key == self.answer:
            table[:, self.key] = self.answers
        return self.unit * table


def look_up_codes(codes: Float64[Tensor, "n a"], of: Int64[Tensor, " v"]) -> Float64[Tensor, "v a"]:
    """Return each token's code, zero where its number is −1."""
    return codes[of.clamp(min=0)] * (of >= 0)[:, None]


@torch.no_grad()
def silence(model: LanguageModel) -> None:
    """Let every layer add exactly zero, by its last linear map alone, which still gets gradient.

    Raises:
        CannotError: for a layer of the user's own.
    """
    for block in model.list_blocks():
        for layer in (block.mixer, block.mlp):
            for last in () if layer is None else _list_last_maps(layer):
                last.zero_()


def _list_last_maps(layer: nn.Module) -> list[Tensor]:
    if isinstance(layer, Attention):
        return [layer.out.weight]
    if isinstance(layer, SSD):
        return [layer.out_proj.weight]
    if isinstance(layer, MLP):
        return [layer.down.weight]
    if isinstance(layer, CDMoE):
        # In form two the experts read φ(x), which is then zero, so they add zero.
        shared = layer.cross_domain.down.weight
        return [shared] if layer.form == "two" else [shared, layer.up]
    if isinstance(layer, PEER):
        return [layer.up]
    if isinstance(layer, SharedExpertMoE):
        return [layer.shared.down.weight, layer.down]
    if isinstance(layer, RoutedMoE):
        return [layer.down]
    raise CannotError(
        f"the lab does not know how to set the weights of {type(layer).__name__} by hand"
    )


@torch.no_grad()
def write_tokens(model: LanguageModel, residual: Residual) -> None:
    """Set the embedding table, and an untied head to the same rows."""
    model.embed.weight.copy_(residual.build_table())
    if model.head.weight is not model.embed.weight:
        model.head.weight.copy_(residual.build_table())


@torch.no_grad()
def read_answers(
    model: LanguageModel, residual: Residual, size: float, others: float, noise: float = 0.0
) -> None:
    """Let the last norm pass answers alone, with a gain at which the loss is `LOSS`.

    Args:
        model: whose last norm is set.
        residual: where answers stand.
        size: an answer's length in units.
        others: most squared units in the rest of the stream.
        noise: standard deviation of the answer's lead over other answers.
    """
    amplitude = size * (residual.d_model / (others + size**2)) ** 0.5
    model.norm_final.weight.zero_()
    gain = _find_scale(residual, noise) / (residual.unit * amplitude * model.norm_final.factor)
    model.norm_final.weight[residual.answer] = gain


def _find_scale(residual: Residual, noise: float) -> float:
    """Return the factor on the cosines of answers at which the mean loss is `LOSS`.

    Noise counts as raising all other answers: raising some matters more than lowering others.
    """
    answers = residual.answers
    some = answers[answers.norm(dim=1) > 0][:SAMPLE]
    products = some @ answers.T
    products = products + noise * (products < 1 - 1e-9)
    low, high = 0.0, 1e4
    for _ in range(40):
        middle = (low + high) / 2
        loss = ((middle * products).logsumexp(1) - middle).mean().item()
        low, high = (middle, high) if loss > LOSS else (low, middle)
    return high

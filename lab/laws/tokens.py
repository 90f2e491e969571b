"""Adapters that let modules that read tokens read vectors instead.

The signs of a vector's last channels encode a token. The other channels, scaled like the rows of
the embedding table, shift the token's embedding. So a changed vector is another token, a rounded
vector is the same token with a slightly shifted embedding, and gradients and noise floors are those
of embeddings.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lab.laws.adapters import PATTERNS
from lab.laws.law import IncomparableError

BITS = 24
"""Channels that encode a token; the probabilities of v tokens differ by a factor 1 + v / 2²⁴."""


class Tokens(nn.Module):
    """A module from tokens [b t] to [b t e] as one from vectors [b t d].

    Args:
        module: the one that reads tokens.
        vocab_size: how many tokens there are.
        table: name of its nn.Embedding, of width d - 24; None if none was found, and then the
            gradient with respect to the vectors is zero.
        skip: the padding token, which is never read.
    """

    module: Any

    def __init__(
        self, module: nn.Module, vocab_size: int, table: str | None, skip: int | None = None
    ):
        super().__init__()
        self.module = module
        self.vocab_size, self.table, self.skip = vocab_size, table, skip
        self.shift = None
        if table is not None:
            embedding = module.get_submodule(table)
            rows = embedding.get_parameter("weight").detach().double()
            self.shift = EmbeddingShift(rows.square().mean().sqrt().item())
            embedding.register_forward_hook(self.shift)
        self.training = module.training

    def forward(self, x: Tensor) -> Tensor:
        """Return the module's output for the tokens that x [b t d] encodes."""
        return self.attach_gradient(x, self.module(self.read_tokens(x)))

    def list_sources(self) -> list[Any]:
        """List what a program needs to make this adapter."""
        return [type(self)]

    def read_tokens(self, x: Tensor) -> Tensor:
        """Return the tokens [b t] that x [b t d] encodes, and set the shift of their embeddings."""
        if self.shift is not None:
            self.shift.by, self.shift.used = x[..., :-BITS], False
        return to_token_ids(x, self.vocab_size, self.skip)

    def attach_gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """Return y with a gradient with respect to x, zero where no embedding is shifted."""
        if self.shift is not None:
            self.shift.by = None
            return y
        return y + 0 * x.sum(-1, keepdim=True).to(y.dtype)


class DecodingTokens(Tokens):
    """`Tokens` for a module that goes on from a state."""

    def __init__(self, module: Any, vocab_size: int, table: str | None, skip: int | None = None):
        super().__init__(module, vocab_size, table, skip)
        self.paddings = getattr(module, "paddings", PATTERNS)
        # A decoder that makes no claim about positions lacks this attribute.
        if hasattr(module, "relative"):
            self.relative = module.relative

    def start(self, batch: int, position: int = 0) -> Any:
        """Return the state before the first token."""
        return self.module.start(batch, position)

    def prefill(
        self, x: Tensor, state: Any = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Return the outputs of further tokens, and the state after them."""
        y, state = self.module.prefill(self.read_tokens(x), state, keep)
        self._check_shift()
        return self.attach_gradient(x, y), state

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the output of one further token, and the state after it."""
        y, state = self.module.step(self.read_tokens(x), state)
        self._check_shift()
        return self.attach_gradient(x, y), state

    def _check_shift(self) -> None:
        """Refuse a decoder that embeds anew the tokens before, which `forward` has shifted."""
        if self.shift is not None and not self.shift.used:
            self.shift.by = None
            raise IncomparableError("it embeds tokens again that it has already read")


class EmbeddingShift:
    """A forward hook of an embedding table that shifts the embeddings.

    Args:
        scale: factor of the shift.
    """

    def __init__(self, scale: float):
        self.scale = scale
        self.by: Tensor | None = None
        self.used = False

    def __call__(self, table: nn.Module, args: Any, embedded: Tensor) -> Tensor:
        """Return the embeddings, shifted if there are as many of them as shifts."""
        if self.by is None or self.by.numel() != embedded.numel():
            return embedded
        self.used = True
        return embedded + self.scale * self.by.reshape(embedded.shape).to(embedded.dtype)


def encode_token(d_model: int, token: int, vocab_size: int, skip: int = -1) -> Tensor:
    """Return a vector [d] that encodes a token and does not shift its embedding; skip -1: none."""
    return encode_tokens(d_model, torch.tensor([token]), vocab_size, skip)[0]


def encode_tokens(d_model: int, tokens: Tensor, vocab_size: int, skip: int = -1) -> Tensor:
    """Return the vectors [n d] of tokens [n], each as `encode_token` returns it."""
    n_read = vocab_size - (skip >= 0)
    numbers = tokens - ((tokens > skip) & (skip >= 0)).long()
    spelt = -(-numbers * 2**BITS // n_read)
    vectors = torch.zeros(len(tokens), d_model, dtype=torch.float64)
    vectors[:, -BITS:] = 2.0 * (spelt[:, None] >> torch.arange(BITS) & 1) - 1
    return vectors


def to_token_ids(x: Tensor, vocab_size: int, skip: int | None = None) -> Tensor:
    """Return the tokens [b t] that the signs of the last channels of x [b t d] encode."""
    powers = 2 ** torch.arange(BITS, device=x.device)
    spelt = ((x[..., -BITS:] > 0) * powers).sum(-1)
    ids = spelt * (vocab_size - (skip is not None)) // 2**BITS
    return ids if skip is None else ids + (ids >= skip)

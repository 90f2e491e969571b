"""Modules that read tokens, tried in the space of all others: vectors.

The signs of a vector's last channels spell a token; the others, scaled to the rows of the embedding
table, move the token's embedding. A vector that changes is another token; one that a rounding moves
is the same token, moved by a rounding. So gradients and noise floors are those of embeddings.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lab.laws.adapters.carried import PATTERNS

BITS = 24
"""Channels that spell a token: of v tokens, none is likelier than another by more than v / 2²⁴."""


class Tokens(nn.Module):
    """A module from tokens [b t] to [b t e] as one from vectors [b t d].

    Args:
        module: the one that reads tokens.
        vocab_size: how many tokens there are.
        table: name of its nn.Embedding, of width d - 24; None where there is none to be found, and
            then a gradient with respect to the vectors is zero.
        skip: a token never to be named, that of padding.
    """

    module: Any

    def __init__(
        self, module: nn.Module, vocab_size: int, table: str | None, skip: int | None = None
    ):
        super().__init__()
        self.module = module
        self.vocab_size, self.table, self.skip = vocab_size, table, skip
        self.moved = None
        if table is not None:
            embedding = module.get_submodule(table)
            rows = embedding.get_parameter("weight").detach().double()
            self.moved = Moved(rows.square().mean().sqrt().item())
            embedding.register_forward_hook(self.moved)
        self.training = module.training

    def forward(self, x: Tensor) -> Tensor:
        """Return what the module makes of the tokens that x [b t d] names."""
        return self.reached(x, self.module(self.named(x)))

    def named(self, x: Tensor) -> Tensor:
        """Return the tokens [b t] of x [b t d], and hold what is to move their embeddings."""
        if self.moved is not None:
            self.moved.by = x[..., :-BITS]
        return token_ids(x, self.vocab_size, self.skip)

    def reached(self, x: Tensor, y: Tensor) -> Tensor:
        """Return y, which has a gradient with respect to x: zero, if nothing else."""
        if self.moved is not None:
            self.moved.by = None
            return y
        return y + 0 * x.sum(-1, keepdim=True).to(y.dtype)


class DecodingTokens(Tokens):
    """`Tokens`, of a module that goes on from a state."""

    def __init__(self, module: Any, vocab_size: int, table: str | None, skip: int | None = None):
        super().__init__(module, vocab_size, table, skip)
        self.paddings = getattr(module, "paddings", PATTERNS)
        # A decoder that says nothing of positions has no such attribute.
        if hasattr(module, "relative"):
            self.relative = module.relative

    def start(self, batch: int, position: int = 0) -> Any:
        """Return the state before the first token."""
        return self.module.start(batch, position)

    def prefill(
        self, x: Tensor, state: Any = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Return the outputs of further tokens, and the state after them."""
        y, state = self.module.prefill(self.named(x), state, keep)
        return self.reached(x, y), state

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the output of one further token, and the state after it."""
        y, state = self.module.step(self.named(x), state)
        return self.reached(x, y), state


class Moved:
    """A forward hook of an embedding table: moves what it returns.

    Args:
        scale: by how much, for vectors of size one.
    """

    def __init__(self, scale: float):
        self.scale = scale
        self.by: Tensor | None = None

    def __call__(self, table: nn.Module, args: Any, embedded: Tensor) -> Tensor:
        """Return the tokens' vectors, moved if what is looked up is as many vectors as move."""
        if self.by is None or self.by.numel() != embedded.numel():
            return embedded
        return embedded + self.scale * self.by.reshape(embedded.shape).to(embedded.dtype)


def token_ids(x: Tensor, vocab_size: int, skip: int | None = None) -> Tensor:
    """Return the tokens [b t] that the signs of the last channels of x [b t d] spell."""
    powers = 2 ** torch.arange(BITS, device=x.device)
    spelt = ((x[..., -BITS:] > 0) * powers).sum(-1)
    ids = spelt * (vocab_size - (skip is not None)) // 2**BITS
    return ids if skip is None else ids + (ids >= skip)

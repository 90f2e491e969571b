"""Foreign modules, how each wants to be called, and the adapter that does it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lab.laws.tokens import to_token_ids


def relative_difference(found: Tensor, asked: Tensor) -> float:
    return float((found - asked).detach().abs().max() / asked.detach().abs().max())


class Model(nn.Module):
    """Tokens and a table of positions, a GRU, a head; the state comes beside the logits."""

    def __init__(self, vocab_size: int = 32):
        super().__init__()
        self.places = nn.Embedding(300, 8)
        self.embed = nn.Embedding(vocab_size, 8)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.gru(x)[0])


@dataclass
class Output:
    loss: Tensor
    hidden: Tensor


class Returning(nn.Module):
    def __init__(self, form: Callable[[Tensor], object]):
        super().__init__()
        self.linear = nn.Linear(8, 6)
        self.form = form

    def forward(self, x: Tensor) -> object:
        return self.form(self.linear(x))


class Placed(nn.Module):
    """Looks its positions up; wants them for each row, or once."""

    def __init__(self, axes: int):
        super().__init__()
        self.table, self.axes = nn.Embedding(300, 8), axes

    def forward(self, x: Tensor, input_pos: Tensor) -> Tensor:
        if input_pos.ndim != self.axes:
            raise ValueError("positions of other axes")
        return x + self.table(input_pos)


class Chunked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.unflatten(1, (-1, 16))).flatten(1, 2)


class TimeFirst(nn.Module):
    """Sums over its first axis; nothing but its outputs says that this is the time."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).cumsum(0)


CALLED: dict[str, tuple[Callable[[], Any], str, Callable[[Any, Tensor], Tensor]]] = {
    "plain": (lambda: nn.Linear(8, 6), "module", lambda m, x: m(x)),
    "function": (lambda: nn.Linear(8, 6).forward, "Adapter(module)", lambda m, x: m(x)),
    "tuple": (
        lambda: Returning(lambda y: (y.sum(), y)),
        "Adapter(module, output=1)",
        lambda m, x: m.linear(x),
    ),
    "dict": (
        lambda: Returning(lambda y: {"n": 3, "y": y}),
        "Adapter(module, output='y')",
        lambda m, x: m.linear(x),
    ),
    "dataclass": (
        lambda: Returning(lambda y: Output(y.sum(), y)),
        "Adapter(module, output='hidden')",
        lambda m, x: m.linear(x),
    ),
    "heads": (
        lambda: Returning(lambda y: y.unflatten(-1, (2, 3))),
        "Adapter(module)",
        lambda m, x: m.linear(x),
    ),
    "convolution": (
        lambda: nn.Conv1d(8, 6, 3, padding=1),
        "Adapter(module, layout='bdt')",
        lambda m, x: m(x.mT).mT,
    ),
    "width of a length": (
        lambda: nn.Conv1d(8, 6, 1, padding=0),
        "Adapter(module, layout='bdt')",
        lambda m, x: m(x.mT).mT,
    ),
    "both ways": (
        lambda: nn.GRU(8, 6, bidirectional=True),
        "Adapter(module, layout='tbd', output=0)",
        lambda m, x: m(x.transpose(0, 1))[0].transpose(0, 1),
    ),
    "time first": (
        TimeFirst,
        "Adapter(module, layout='tbd')",
        lambda m, x: m.linear(x).cumsum(1),
    ),
    "positions": (
        lambda: Placed(1),
        "Adapter(module, calls=call_positioned, name='input_pos', batched=False)",
        lambda m, x: m(x, torch.arange(16)),
    ),
    "positions of rows": (
        lambda: Placed(2),
        "Adapter(module, calls=call_positioned, name='input_pos', batched=True)",
        lambda m, x: m(x, torch.arange(16).expand(3, 16)),
    ),
    "chunks": (Chunked, "module", lambda m, x: m(x)),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2),
        "Adapter(module, calls=call_masked, layout='tbd', output=0)",
        lambda m, x: attend(m, x),
    ),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        "Adapter(module, calls=call_masked)",
        lambda m, x: m(x, nn.Transformer.generate_square_subsequent_mask(16)),
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16), 1, enable_nested_tensor=False
        ),
        "Adapter(module, calls=call_masked, layout='tbd')",
        lambda m, x: m(
            x.transpose(0, 1), nn.Transformer.generate_square_subsequent_mask(16)
        ).transpose(0, 1),
    ),
    "tokens": (
        Model,
        "Tokens(module, vocab_size=32, table='embed')",
        lambda m, x: m(to_token_ids(x, 32)),
    ),
    "table alone": (
        lambda: nn.Embedding(32, 8),
        "Tokens(module, vocab_size=32, table='')",
        lambda m, x: m(to_token_ids(x, 32)),
    ),
}


def attend(module: nn.MultiheadAttention, x: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    x = x.transpose(0, 1)
    return module(x, x, x, attn_mask=mask)[0].transpose(0, 1)

"""Foreign modules that decode, and the adapter that continues from their state."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lab.models import build


class Going(nn.Module):
    """Returns its state beside its output, and writes into the one that it is given."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x: Tensor, cache: dict | None = None) -> tuple[Tensor, None, dict]:
        z = self.linear(x).cumsum(1)
        if cache is None:
            cache = {"sum": torch.zeros_like(z[:, 0])}
        y = z + cache["sum"][:, None]
        cache["sum"].copy_(y[:, -1])
        return y.tanh(), None, cache


class _Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def overwrite(self, x: Tensor, total: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the running sums, and their last, which replaces the total before."""
        total = x.new_zeros(len(x), 6) if total is None else total
        y = self.linear(x).cumsum(1) + total[:, None]
        return y.tanh(), total.copy_(y[:, -1])


class Overwriting(_Sum):
    """Writes into the tensor that it is given as its state."""

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.overwrite(x, state)


class OverwritingCache(_Sum):
    """The same, of a tensor that is called a cache."""

    def forward(self, x: Tensor, kv_cache: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.overwrite(x, kv_cache)


class OverwritingStep(_Sum):
    """The same, by a method for one token."""

    def init_state(self, batch: int) -> tuple[Tensor]:
        return (self.linear.bias.new_zeros(batch, 6),)

    def forward(self, x: Tensor) -> Tensor:
        return self.overwrite(x, None)[0]

    def step(self, x: Tensor, state: tuple[Tensor]) -> tuple[Tensor, tuple[Tensor]]:
        y, total = self.overwrite(x[:, None], state[0])
        return y[:, 0], (total,)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def init_state(self, batch: int) -> Tensor:
        return self.cell.weight_hh.new_zeros(batch, 8)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(x, state)
        return state, state

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(self.outputs(x, self.init_state(len(x))), 1)

    def outputs(self, x: Tensor, state: Tensor) -> list[Tensor]:
        outputs = []
        for one in x.unbind(1):
            y, state = self.step(one, state)
            outputs.append(y)
        return outputs


class TakesState(nn.Module):
    """Its state is required, and made by a method."""

    def __init__(self):
        super().__init__()
        self.inner = Cell()

    def zero_state(self, batch: int) -> Tensor:
        return self.inner.init_state(batch)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.inner.outputs(x, h)
        return torch.stack(outputs, 1), outputs[-1]


class Cached(nn.Module):
    """As mamba-ssm's are: a state for inference, filled by forward and written to by step."""

    def __init__(self, layer_idx: int | None):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.layer_idx = layer_idx

    def allocate_inference_cache(self, batch_size, max_seqlen, dtype=None):
        return tuple(torch.zeros(batch_size, 8, dtype=dtype) for _ in range(2))

    def forward(self, x: Tensor, inference_params=None) -> Tensor:
        z = self.linear(x)
        if inference_params is not None:
            last, total = inference_params.key_value_memory_dict[self.layer_idx]
            last.copy_(z[:, -1])
            total.copy_(z.sum(1))
        return z.cumsum(1) + torch.cat([torch.zeros_like(z[:, :1]), z[:, :-1]], 1)

    def step(self, x: Tensor, last: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.linear(x[:, 0])
        total.add_(z)
        y = total + last
        last.copy_(z)
        return y[:, None], last, total


class CachedVectors(Cached):
    """The same, with tokens of [b d]."""

    def step(self, x: Tensor, last: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if x.ndim > 2:
            raise ValueError("one token")
        y, last, total = super().step(x[:, None], last, total)
        return y[:, 0], last, total


class TimedCell(Cell):
    """The same, with tokens of [b 1 d], and a first state of its own."""

    init_state = None  # type: ignore[assignment]

    def step(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        after = self.cell(x.squeeze(1), state)
        return after[:, None], after

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.step(x[:, :1])
        outputs = [y]
        for i in range(1, x.shape[1]):
            y, state = self.step(x[:, i : i + 1], state)
            outputs.append(y)
        return torch.cat(outputs, 1)


class ReturnedBeside(nn.Module):
    """Returns its state beside the outputs; has a step, too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x: Tensor):
        y = self.linear(x).cumsum(1)
        return y, y[:, -1]

    def step(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x) + past
        return y, y


class Beside(ReturnedBeside):
    """Returns its state where asked, and takes one, for any number of tokens."""

    def forward(self, x: Tensor, past: Tensor | None = None, use_cache: bool = False):
        y = self.linear(x).cumsum(1)
        y = y if past is None else y + past[:, None]
        return (y, y[:, -1]) if use_cache else y


class ReturnedLate(ReturnedBeside):
    """The state that forward returns lacks the last token."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = super().forward(x)
        return y, y[:, -2] if x.shape[1] > 1 else y[:, 0]


class Stubborn(nn.Linear):
    """Has a step that cannot be called."""

    def step(self, x: Tensor, state: Tensor, more: Tensor) -> Tensor:
        return x


def write_recipe(advances: str, options: str) -> str:
    """Return how an adapter is made that goes on by a function."""
    return f"DecodingAdapter(module, advances={advances}, {options})"


DECODERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gru": (
        lambda: nn.GRU(8, 6, 2),
        write_recipe("advance_recurrent", "relative=True, positioned=True, output=0, layout='tbd'"),
    ),
    "lstm": (
        lambda: nn.LSTM(8, 6, batch_first=True),
        write_recipe("advance_recurrent", "relative=True, positioned=True, output=0"),
    ),
    "returned": (
        Going,
        write_recipe(
            "advance_returned",
            "calls=call_returned, name='cache', flag=None, initial=None, output=0, place=2",
        ),
    ),
    "stepping": (
        Cell,
        write_recipe("advance_steps", "initial='init_state', timed=False"),
    ),
    "told": (
        TakesState,
        write_recipe(
            "advance_returned",
            "calls=call_returned, name='h', flag=None, initial='zero_state', output=0, place=1",
        ),
    ),
    "at once": (
        lambda: Cached(0),
        write_recipe("advance_allocated", "timed=True"),
    ),
    "by steps": (
        lambda: Cached(None),
        write_recipe("advance_allocated", "timed=True"),
    ),
    "by steps of vectors": (
        lambda: CachedVectors(None),
        write_recipe("advance_allocated", "timed=False"),
    ),
    "stepping in time": (
        TimedCell,
        write_recipe("advance_steps", "initial=None, timed=True"),
    ),
    "returned where asked": (
        Beside,
        write_recipe(
            "advance_steps",
            "name='past', flag='use_cache', initial=None, timed=False, output=0, place=1",
        ),
    ),
    "returned beside a step": (
        ReturnedBeside,
        write_recipe(
            "advance_steps",
            "name=None, flag=None, initial=None, timed=False, output=0, place=1",
        ),
    ),
    "tokens": (
        lambda: build("AM", vocab_size=32, d_model=8),
        "DecodingTokens(module, vocab_size=32, table='embed')",
    ),
}

"""torch's own recurrent networks and attention layers."""

from typing import Any

import torch
from torch import Tensor, nn

from lab.laws.adapters.carried import Carried
from lab.laws.adapters.plain import PlainAdapter, lay_out
from lab.laws.adapters.stateful import Stateful


class TorchRecurrent(Stateful):
    """torch's RNN, GRU or LSTM, of one direction; its states [layers b h] are kept as [b layers h].

    It reads no positions, so by default only differences of positions count.
    """

    def __init__(
        self,
        module: Any,
        relative: bool = True,
        output: int | str | None = 0,
        layout: str = "btd",
    ):
        super().__init__(module, relative, output, layout)

    def start(self, batch: int, position: int = 0) -> Carried:
        """Return the state before the first token, at any position: none is read."""
        state = super().start(batch)
        return state._replace(position=state.position + position)

    def advance(self, x: Tensor, held: Any) -> tuple[Tensor, Any]:
        """Return the outputs of further tokens, and the states, (h,) or (h, c)."""
        hidden = None
        if held is not None:
            hidden = tuple(h.transpose(0, 1).contiguous() for h in held)
            hidden = hidden if isinstance(self.module, nn.LSTM) else hidden[0]
        y, hidden = self.module(lay_out(x, self.layout), hidden)
        hidden = hidden if isinstance(hidden, tuple) else (hidden,)
        return lay_out(y, self.layout), tuple(h.transpose(0, 1) for h in hidden)


class Masked(PlainAdapter):
    """torch's MultiheadAttention, TransformerEncoderLayer or TransformerEncoder, under a mask.

    Causality is requested twice: by the mask [t s], True where s is later than t, and by
    `is_causal`, which allows a kernel that does not read the mask.
    """

    def call(self, x: Tensor) -> Any:
        """Return the self-attention over x."""
        given, t = lay_out(x, self.layout), x.shape[1]
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        if isinstance(self.module, nn.MultiheadAttention):
            options = {"attn_mask": mask, "is_causal": True, "need_weights": False}
            return self.module(given, given, given, **options)
        return self.module(given, mask, is_causal=True)

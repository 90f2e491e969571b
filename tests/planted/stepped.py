"""A decoder whose forward keeps no state; `step` takes one token and begins from None."""

import torch
from torch import Tensor, nn

from tests.planted.attention import D_MODEL
from tests.planted.entry import Fault


class NormedSum(nn.Module):
    """A sum that forgets, normalised for the output only."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(D_MODEL, D_MODEL)
        self.norm = nn.RMSNorm(D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b t d] to [b t d]."""
        total, outputs = torch.zeros_like(x[:, 0]), []
        for one in self.mix(x).unbind(1):
            total = 0.9 * total + one
            outputs.append(self.norm(total))
        return torch.stack(outputs, 1)

    def step(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map a token [b d] to [b d], and return the sum after it."""
        total = self.mix(x) if state is None else 0.9 * state + self.mix(x)
        return self.norm(total), total


class _CarriesNormed(NormedSum):
    """`step` goes on from the normalised sum."""

    def step(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, _ = super().step(x, state)
        return y, y


STEPPED = (Fault("step goes on from its output", "prefill = step", _CarriesNormed),)

"""A correct state-space mixer that decodes, in small methods, so that a fault can replace one."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.layers.state import next_position
from tests.planted.attention import D_MODEL, HEADS
from tests.planted.scans import CHUNK, KERNEL

STATE = 4


class ScanState(NamedTuple):
    """The last inputs of the convolution, and the state of the recurrence."""

    window: Tensor  # [b k-1 d]
    hidden: Tensor  # [b h p n]
    position: Tensor  # [b]


class StateSpace(nn.Module):
    """A convolution, then h ← exp(dt·A)·h + dt·x·Bᵀ, y = h·C + D·x, in chunks; a gate at the end.

    Padding is moved after the tokens of its row, where the rate dt is zero, and back at the end.
    """

    relative = True

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(D_MODEL, 2 * D_MODEL + 2 * STATE + HEADS, bias=False)
        self.filter = nn.Parameter(torch.randn(D_MODEL, KERNEL) / 2)
        self.rate_bias = nn.Parameter(torch.linspace(-2, 0, HEADS))
        self.A_log = nn.Parameter(torch.rand(HEADS))
        self.D = nn.Parameter(torch.ones(HEADS))
        self.out = nn.Linear(D_MODEL, D_MODEL, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.prefill(x)[0]

    def start(self, batch: int, position: int = 0) -> ScanState:
        zeros = self.filter.new_zeros
        return ScanState(
            zeros(batch, KERNEL - 1, D_MODEL),
            zeros(batch, HEADS, D_MODEL // HEADS, STATE),
            torch.full((batch,), position),
        )

    def prefill(
        self, x: Tensor, state: ScanState | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, ScanState]:
        before = self.start(len(x)) if state is None else state
        position = next_position(x, before, keep)
        kept = x.new_ones(x.shape[:2], dtype=torch.bool) if keep is None else keep
        order = (~kept).int().argsort(dim=1, stable=True)
        x, kept = x.take_along_dim(order[..., None], 1), kept.take_along_dim(order, 1)
        z, gate, B, C, dt = self._project_in(x)
        read = torch.cat([before.window, z], 1)
        u = F.conv1d(read.mT, self.filter[:, None], groups=D_MODEL).mT
        u = F.silu(u).unflatten(-1, (HEADS, -1))
        rate = self._mask_rate(self._compute_rate(dt), kept)
        y, hidden = self._run_chunks(u, rate, B, C, before.hidden)
        y = self._gate(self._add_skip(y, u), gate)
        window = self._keep_window(read, kept.sum(1))
        back = order.argsort(dim=1)
        return y.take_along_dim(back[..., None], 1), ScanState(window, hidden, position)

    def step(self, x: Tensor, state: ScanState) -> tuple[Tensor, ScanState]:
        z, gate, B, C, dt = self._project_in(x)
        read = torch.cat([state.window, z[:, None]], 1)
        u = F.silu((read * self.filter.mT).sum(1)).unflatten(-1, (HEADS, -1))
        rate = self._compute_step_rate(dt)
        decay = (rate * -self.A_log.exp())[..., None, None].exp()
        added = (rate[..., None] * u)[..., None] * B[:, None, None]
        hidden = decay * state.hidden + added
        y = self._add_step_skip((hidden @ C[:, None, :, None])[..., 0], u)
        after = ScanState(self._slide(state.window, z), hidden, state.position + 1)
        return self._gate(y, gate), after

    def _project_in(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.enter(x).split([D_MODEL, D_MODEL, STATE, STATE, HEADS], dim=-1)

    def _compute_rate(self, dt: Tensor) -> Tensor:
        return F.softplus(dt + self.rate_bias)

    def _compute_step_rate(self, dt: Tensor) -> Tensor:
        return self._compute_rate(dt)

    def _mask_rate(self, rate: Tensor, kept: Tensor) -> Tensor:
        return rate * kept[..., None]

    def _keep_window(self, read: Tensor, n_kept: Tensor) -> Tensor:
        """Return the last inputs before the padding."""
        last = n_kept[:, None] + torch.arange(KERNEL - 1)
        return read.take_along_dim(last[..., None], 1)

    def _slide(self, window: Tensor, z: Tensor) -> Tensor:
        return torch.cat([window[:, 1:], z[:, None]], 1)

    def _add_skip(self, y: Tensor, u: Tensor) -> Tensor:
        return y + self.D[:, None] * u

    def _add_step_skip(self, y: Tensor, u: Tensor) -> Tensor:
        return self._add_skip(y, u)

    def _gate(self, y: Tensor, gate: Tensor) -> Tensor:
        return self.out(y.flatten(-2) * F.silu(gate))

    def _run_chunks(
        self, u: Tensor, rate: Tensor, B: Tensor, C: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        t = u.shape[1]
        u, rate, B, C = (
            F.pad(z, (0, 0) * (z.ndim - 2) + (0, -t % CHUNK)).unflatten(1, (-1, CHUNK))
            for z in (u, rate, B, C)
        )  # [b c l …]
        u = u * rate[..., None]
        steps = (rate * -self.A_log.exp()).movedim(-1, 1)  # [b h c l]
        decay = self._compute_decay(steps)
        scores = (C @ B.mT)[:, None] * decay
        inside = torch.einsum("bhclm, bcmhp -> bclhp", scores, u)
        added = torch.einsum("bhcm, bcmn, bcmhp -> cbhpn", decay[..., -1, :], B, u)
        whole = steps.sum(-1).exp().movedim(2, 0)[..., None, None]
        before, hidden = self._carry(added, whole, hidden)
        since = steps.cumsum(-1).exp()
        y = inside + torch.einsum("bhcl, bcln, cbhpn -> bclhp", since, C, before)
        return y.flatten(1, 2)[:, :t], hidden

    def _compute_decay(self, steps: Tensor) -> Tensor:
        """Return exp of the sum of the log-decays after token m up to token l, as [… l m]."""
        lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
        sums = (steps[..., None] * lower.tril(-1)).cumsum(-2)
        return sums.exp() * lower

    def _carry(self, added: Tensor, whole: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the state before each chunk, and after the last."""
        before = []
        for one, decay in zip(added, whole, strict=True):
            before.append(hidden)
            hidden = decay * hidden + one
        return torch.stack(before), hidden

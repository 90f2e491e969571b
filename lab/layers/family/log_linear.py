"""Log-linear attention: Mamba-2 with a state for each power of two of tokens in the past."""

from typing import Any, Unpack, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lab.layers.recurrence import Recurrence, RecurrentState, Shared, Terms
from lab.layers.ssd import draw_dt_bias, draw_log_rates
from lab.layers.state import next_position
from lab.ops.log_linear import collect_levels, log_linear, log_linear_matrix, log_linear_step


class LogLinearAttention(Recurrence):
    """y_t = Σ_{s≤t} λ_t^{(ℓ)} exp(−A Σ_{s<r≤t} dt_r) (q_t·k_s) dt_s v_s + D v_t.

    ℓ is the number of bits of t xor s: a token reads itself at level 0, and the tokens before it in
    groups of 2^{ℓ−1} at level ℓ, of which the nearest are the smallest (`lab.ops.log_linear`).
    λ = softplus(Λ ⊙ ·) and dt = softplus(· + c) are linear in x but for what is shown. q, k and v
    pass a convolution and SiLU.

    Args:
        d_model: width d.
        n_heads: heads h.
        n_levels: levels, ≥ 2; of more than 2^(n_levels − 2) tokens the last one holds all others.
        shared: options of `lab.layers.recurrence.Shared`; there are no chunks.

    Raises:
        ValueError: for fewer than two levels.

    Source: Guo et al. 2025 (2506.04761), on Mamba-2, with λ as in flash-linear-attention's code.
    Departs: each head has its own q and k; heads are normed apart, before the gate.
    """

    usual = Shared(conv_width=4, activation="silu", gate="silu")
    conv_bias = True

    def __init__(
        self, d_model: int, n_heads: int = 1, *, n_levels: int = 15, **shared: Unpack[Shared]
    ):
        if n_levels < 2:
            raise ValueError(f"{n_levels=} must be at least 2")
        super().__init__(d_model, n_heads, **shared)
        self.n_levels, self.carry_width = n_levels, 1
        self.dt_proj = nn.Linear(d_model, n_heads)
        self.level_proj = nn.Linear(d_model, n_heads * n_levels, bias=False)
        self.level_scale = nn.Parameter(torch.ones(n_heads, n_levels))
        self.A_log = nn.Parameter(draw_log_rates(n_heads))
        self.D = nn.Parameter(torch.ones(n_heads))
        with torch.no_grad():
            self.dt_proj.bias.copy_(draw_dt_bias(n_heads))

    @property
    def state_width(self) -> int:
        """Numbers that the state holds for each channel of the values: keys at each level but 0."""
        return (self.n_levels - 1) * self.d_state

    def start(self, batch: int, position: int = 0) -> RecurrentState:
        """Return the state before the first token, whose position is the carry."""
        state = super().start(batch, position)
        return state._replace(carry=torch.full_like(state.carry, position))

    def decide(
        self,
        x: Float[Tensor, "b t d"],
        q: Float[Tensor, "b t h n"],
        k: Float[Tensor, "b t h n"],
        v: Float[Tensor, "b t h p"],
    ) -> Terms:
        """Return q, dt k, v, the decays, D, and the scale of each level."""
        dt = F.softplus(self.dt_proj(x).to(q))
        log_decay = self.hook_log_decay(-self.A_log.to(q).exp() * dt)
        scales = self.level_proj(x).to(q).unflatten(-1, (self.n_heads, -1))
        scales = F.softplus(self.level_scale.to(q) * scales)
        skip = self.D.to(q).expand(dt.shape)
        return Terms(q, dt[..., None] * k, v, log_decay, skip=skip, scales=scales)

    def prefill(
        self,
        x: Float[Tensor, "b t d"],
        state: RecurrentState | None = None,
        keep: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], RecurrentState]:
        """Return the outputs of further tokens, and the state after them.

        Levels are of positions in the row: padding is moved behind its tokens. After a state, or
        with a hook on states, tokens are read one by one.
        """
        self._check(x, state, keep)
        order = None
        if keep is not None:
            order = (~keep).long().argsort(dim=1, stable=True)
            x = x.masked_fill(~keep[..., None], 0).take_along_dim(order[..., None], 1)
            keep = keep.take_along_dim(order, 1)
        terms, tail, carry = cast(Any, self._compute(x, state, keep))
        after = next_position(x, state, keep)
        if state is None and not self.hook_state.active:
            z, _ = self._mix(terms, None)
            levels = collect_levels(terms.k, terms.v, terms.log_decay, self.n_levels, after)
            memory = rearrange(levels, "b l h n p -> b h (l n) p")
        else:
            before = self.start(len(x)) if state is None else state
            z, memory = self._read(terms, before, keep)
        y = self.project(x, rearrange(z, "b t h p -> b h t p"))
        if order is not None:
            y = y.take_along_dim(order.argsort(dim=1)[..., None], 1)
        return y, RecurrentState(memory, tail, carry, after)

    def step(
        self, x: Float[Tensor, "b d"], state: RecurrentState
    ) -> tuple[Float[Tensor, "b d"], RecurrentState]:
        """Return the output of one further token, and the state after it."""
        y, state = self.prefill(x[:, None], state)
        return y[:, 0], state

    def matrix(
        self, x: Float[Tensor, "b s d"], rows: slice | None = None
    ) -> Float[Tensor, "b h t s"]:
        """Return the matrix, or some of its rows; quadratic, for analysis."""
        terms: Any = self._compute(x)[0]
        M = log_linear_matrix(terms.q, terms.k, terms.log_decay, terms.scales)
        M = M + terms.skip.mT.diag_embed()
        return M if rows is None else M[:, :, rows]

    def _mix(self, terms: Any, memory: Tensor | None) -> tuple[Any, Any]:
        if self.hook_state.active:
            return self._read(terms, self.start(len(terms.q)), None)
        z = log_linear(terms.q, terms.k, terms.v, terms.log_decay, terms.scales)
        return z + terms.skip[..., None] * terms.v, memory

    def _read(self, terms, state, keep):
        """Return the outputs token by token, and the state after these tokens."""
        levels = rearrange(state.memory, "b h (l n) p -> b l h n p", n=self.d_state)
        at, states = state.position - state.carry[:, 0].long(), []
        for i in range(terms.q.shape[1]):
            k, v, g, scales = (z[:, i] for z in (terms.k, terms.v, terms.log_decay, terms.scales))
            read, after = log_linear_step(k, v, g, scales, levels, at)
            states.append(read)
            kept = torch.ones_like(at, dtype=torch.bool) if keep is None else keep[:, i]
            levels = torch.where(kept[:, None, None, None, None], after, levels)
            at = at + kept
        states = self.hook_state(torch.stack(states, 1))
        z = torch.einsum("bthnp,bthn->bthp", states, terms.q)
        return z + terms.skip[..., None] * terms.v, rearrange(levels, "b l h n p -> b h (l n) p")

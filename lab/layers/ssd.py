"""The SSD sequence mixer: state space duality with rotary positions on C and B."""

import math
from typing import Literal, NamedTuple, get_args

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from lab.hooks import HookPoint
from lab.layers.choices import one_of
from lab.ops.rope import Layout, apply_rotary, rotary_table
from lab.ops.ssd import ssd, ssd_chunked
from lab.ops.ssd_forms import matrix_from_decay, read_states, scan_states, state_writes

Position = Literal["rope", "none"]
DtInit = Literal["mamba2", "paper"]
Groups = Literal["interleaved", "tiled"]


def _high(x: Tensor) -> torch.dtype:
    """Return the precision to mix in: decays compound, so fp32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


class _Inputs(NamedTuple):
    """What a sequence turns into before it is mixed, each through its hook."""

    dt: Float[Tensor, "b t h"]
    log_decay: Float[Tensor, "b t h"]
    B: Float[Tensor, "b t g n"]
    C: Float[Tensor, "b t g n"]


class SSD(nn.Module):
    """Mixes a sequence by h_t = exp(dt_t A) h_{t−1} + dt_t x_t ⊗ B_t, y_t = h_t C_t + D x_t.

    x, B, C and dt are linear in the residual stream, dt through a softplus; B and C are turned
    by rotary positions. No biases, but dt's. As one matrix: M̃ = L ∘ CBᵀ ∘ dt + D, and
    forward(x) = project(x, matrix(x) @ values(x)).

    Args:
        d_model: width d; each head is d_model / n_heads wide.
        n_heads: heads h, each with its own decay rate A < 0.
        d_state: width n of the state that each head's channel has; even for rotation.
        n_groups: sets g of B and C, shared among heads; divides n_heads.
        chunk_len: tokens handled as one matrix; changes speed alone.
        position: what tells B and C their positions.
        rope_base: base of the rotation.
        rope_layout: which channels of B and C make a pair.
        dt_init: "mamba2" starts at dt in [0.001, 0.1] and A in [−16, −1], so that heads remember
            for tens to hundreds of tokens; "paper" has A = −1 … −h and no bias, where dt is near
            0.7 and the slowest head halves at each token (erratum S4).
        groups: "interleaved" gives neighbouring heads one group (0 0 1 1), as kernels do;
            "tiled" is the listing read literally (0 1 0 1, erratum S3).
        skip: whether D x is added.

    Raises:
        ValueError: for widths that do not divide, an odd d_state under rotation, unknown names.

    Source: lst:ssd_algorithm_pytorch and the listing after it; eq. rope_cb.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int = 1,
        *,
        d_state: int = 128,
        n_groups: int = 1,
        chunk_len: int = 256,
        position: Position = "rope",
        rope_base: float = 10000.0,
        rope_layout: Layout = "half",
        dt_init: DtInit = "mamba2",
        groups: Groups = "interleaved",
        skip: bool = True,
    ):
        super().__init__()
        one_of("position", position, get_args(Position))
        one_of("rope_layout", rope_layout, get_args(Layout))
        one_of("dt_init", dt_init, get_args(DtInit))
        one_of("groups", groups, get_args(Groups))
        for field, value in (("n_heads", n_heads), ("n_groups", n_groups), ("d_state", d_state)):
            if value < 1:
                raise ValueError(f"{field}={value} must be at least 1")
        if d_model < 1 or d_model % n_heads:
            raise ValueError(f"{d_model=} must be a positive multiple of {n_heads=}")
        if n_heads % n_groups:
            raise ValueError(f"{n_groups=} must divide {n_heads=}")
        if chunk_len < 1:
            raise ValueError(f"{chunk_len=} must be at least 1")
        if position == "rope" and d_state % 2:
            raise ValueError(f"{d_state=} must be even for position='rope'")
        self.n_heads, self.n_groups, self.chunk_len = n_heads, n_groups, chunk_len
        self.position, self.rope_base, self.groups = position, rope_base, groups
        self.rope_layout: Layout = rope_layout

        self.x_proj = nn.Linear(d_model, d_model, bias=False)
        self.B_proj = nn.Linear(d_model, n_groups * d_state, bias=False)
        self.C_proj = nn.Linear(d_model, n_groups * d_state, bias=False)
        self.dt_proj = nn.Linear(d_model, n_heads, bias=dt_init == "mamba2")
        self.A_log = nn.Parameter(torch.arange(1.0, n_heads + 1).log())
        self.D = nn.Parameter(torch.ones(n_heads)) if skip else None
        self.out_proj = nn.Linear(d_model, d_model, bias=False)
        if dt_init == "mamba2":
            self._init_as_mamba2()

        self.hook_dt = HookPoint()  # [b t h]
        self.hook_log_decay = HookPoint()  # [b t h], ≤ 0
        self.hook_B_pre = HookPoint()  # [b t g n], as the next three
        self.hook_B_rot = HookPoint()
        self.hook_C_pre = HookPoint()
        self.hook_C_rot = HookPoint()
        self.hook_ssm_write = HookPoint()  # [b t h p n]
        self.hook_ssm_state = HookPoint()  # [b t h p n], after each token
        self.hook_ssm_out = HookPoint()  # [b t h p]

    @torch.no_grad()
    def _init_as_mamba2(self) -> None:
        """Draw A from U(−16, −1), and the bias that makes dt log-uniform in [0.001, 0.1]."""
        self.A_log.uniform_(1, 16).log_()
        dt = torch.empty(self.n_heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_proj.bias.copy_(dt.expm1().log())

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return the mixed sequence, token by token where a hook looks at writes or states."""
        z = self._mix(self._values(x), self._inputs(x))
        return self.project(x, rearrange(z, "b t h p -> b h t p"))

    def matrix(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b h t s"]:
        """Return M̃, with dt on its columns and D on its diagonal; quadratic, for analysis."""
        return matrix_from_decay(*self._inputs(x), D=self.D)

    def values(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b h s p"]:
        """Return what the matrix mixes."""
        return rearrange(self._values(x), "b s h p -> b h s p")

    def project(
        self, x: Float[Tensor, "b t d"], z: Float[Tensor, "b h t p"]
    ) -> Float[Tensor, "b t d"]:
        """Return the heads' mixed values as an output; SSD adds nothing else from x."""
        z = self.hook_ssm_out(rearrange(z, "b h t p -> b t h p"))
        return self.out_proj(rearrange(z, "b t h p -> b t (h p)").to(x.dtype))

    def _values(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t h p"]:
        x = self.x_proj(x).to(_high(x))
        return rearrange(x, "b t (h p) -> b t h p", h=self.n_heads)

    def _inputs(self, x: Float[Tensor, "b t d"]) -> _Inputs:
        high = _high(x)
        dt = self.hook_dt(nn.functional.softplus(self.dt_proj(x).to(high)))
        log_decay = self.hook_log_decay(dt * self._decay_rates())
        B, C = (
            rearrange(f(x).to(high), "b t (g n) -> b t g n", g=self.n_groups)
            for f in (self.B_proj, self.C_proj)
        )
        B, C = self.hook_B_pre(B), self.hook_C_pre(C)
        if self.position == "rope":
            positions = torch.arange(x.shape[1], device=x.device)
            cos, sin = rotary_table(positions, B.shape[-1], self.rope_base, high)
            B, C = (apply_rotary(z, cos, sin, self.rope_layout) for z in (B, C))
        B, C = self.hook_B_rot(B), self.hook_C_rot(C)
        if self.groups == "tiled":
            B, C = (z.repeat(1, 1, self.n_heads // self.n_groups, 1) for z in (B, C))
        return _Inputs(dt, log_decay, B, C)

    def _decay_rates(self) -> Float[Tensor, " h"]:
        """Return A, in fp32 at least."""
        return -self.A_log.to(_high(self.A_log)).exp()

    def _mix(self, x: Float[Tensor, "b t h p"], inputs: _Inputs) -> Float[Tensor, "b t h p"]:
        dt, log_decay, B, C = inputs
        if self.hook_ssm_write.active or self.hook_ssm_state.active:
            writes = self.hook_ssm_write(state_writes(x, dt, B))
            states = self.hook_ssm_state(scan_states(writes, log_decay))
            return read_states(states, x, C, self.D)
        if self.hook_log_decay.active:
            # A hook may have put in log-decays that no A gives.
            return ssd_chunked(x, dt, log_decay, B, C, self.D, self.chunk_len, None)[0]
        return ssd(x, dt, self._decay_rates(), B, C, self.D, self.chunk_len)[0]

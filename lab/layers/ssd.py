"""The SSD sequence mixer: state space duality, and what tells its tokens their positions."""

import math
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lab.hooks import HookPoint
from lab.layers.choices import require_one_of
from lab.layers.convolution import CausalConvolution
from lab.layers.mixer import RotaryPairs
from lab.layers.state import check_decoding, next_position, token_positions
from lab.ops.rope import Layout, apply_rotary, rotary_table
from lab.ops.ssd import ssd, ssd_step
from lab.ops.ssd_backends import BACKENDS, resolve_backend
from lab.ops.ssd_chunked import ssd_chunked
from lab.ops.ssd_forms import matrix_from_decay, read_states, scan_states, state_writes
from lab.peers import PEERS, explain_missing

Position = Literal["rope", "conv", "decay", "none"]
Gate = Literal["none", "silu", "norm"]
DtInit = Literal["mamba2", "paper"]
Groups = Literal["interleaved", "tiled"]

NORM_EPS = 1e-5
"""What the gated norm adds to a mean square, as mamba-ssm and transformers do by default."""


def _high(x: Tensor) -> torch.dtype:
    """Return the precision to mix in: decays compound, so fp32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


class SSDState(NamedTuple):
    """What an SSD layer carries: of one size, however many tokens it has read.

    Attributes:
        ssm: the recurrence's state, in fp32 at least.
        conv: the last conv_width − 1 inputs of the convolution, x, B and C side by side, in fp32
            at least (axes as in `lab.layers.convolution`); none without a convolution.
        position: of the next token.
    """

    ssm: Float[Tensor, "b h p n"]
    conv: Float[Tensor, "b w c"]
    position: Int[Tensor, " b"]


class _Inputs(NamedTuple):
    """What a sequence turns into before it is mixed, all but x through its hook."""

    x: Float[Tensor, "b t h p"]
    dt: Float[Tensor, "b t h"]
    log_decay: Float[Tensor, "b t h"]
    B: Float[Tensor, "b t g n"]
    C: Float[Tensor, "b t g n"]


class SSD(nn.Module):
    """Mixes a sequence by h_t = exp(dt_t A) h_{t−1} + dt_t x_t ⊗ B_t, y_t = h_t C_t + D x_t.

    x, B, C and dt are linear in the residual stream, dt through a softplus; `position` says what
    x, B and C pass through next, and `gate` what y does. No biases, but dt's and the convolution's.
    As one matrix: M̃ = L ∘ CBᵀ ∘ dt + D, and forward(x) = project(x, matrix(x) @ values(x)).

    Args:
        d_model: width d.
        n_heads: heads h, each d_inner / n_heads wide, with its own decay rate A < 0.
        d_state: width n of the state that each head's channel has; even for rotation.
        n_groups: sets g of B and C, shared among heads; divides n_heads.
        d_inner: width of all heads' values together; None: d_model. Mamba-2 has 2·d_model.
        chunk_len: tokens handled as one matrix; changes speed alone.
        position: "rope" turns B and C by rotary positions; "conv" puts x, B and C through a
            causal depthwise convolution and a SiLU, as Mamba-2 does; "decay" leaves them as they
            are, and only the decay tells near from far; "none" has no decay either: no A, the
            log-decay is 0, and the layer is linear attention that weights what it writes by dt; its
            state grows without bound.
        rope_base: base of the rotation.
        rope_layout: which channels of B and C make a pair.
        conv_width: tokens that the convolution sums over; None: 4 where there is one.
        dt_init: "mamba2" starts at dt in [0.001, 0.1] and A in [−16, −1], so that heads remember
            for tens to hundreds of tokens; "paper" has A = −1 … −h and no bias, where dt is near
            0.7 and the slowest head halves at each token (erratum S4).
        groups: "interleaved" gives neighbouring heads one group (0 0 1 1), as kernels do;
            "tiled" is the listing read literally (0 1 0 1, erratum S3).
        skip: whether D x is added.
        gate: "silu" gives y ⊙ silu(W_z x); "norm" the RMSNorm of that, over each of n_groups equal
            parts of d_inner by itself, as mamba-ssm 2.3.2 and transformers 5.23 do.
        backend: who computes sequences, by its name in `lab.ops.ssd_backends`, or "auto". Single
            steps, and what hooks look into or replace, are computed by plain torch.

    Raises:
        ValueError: for widths that do not divide, an odd d_state under rotation, a conv_width
            below 1 or without a convolution, unknown names.

    Source: lst:ssd_algorithm_pytorch and the listing after it; eq. rope_cb; § Related Work for
        the other positions.
    """

    # What the layer offers (`lab.layers.mixer`).
    matrix_form = "M̃ = L∘CBᵀ·dt + D"
    recurrent_hooks = ("hook_ssm_write", "hook_ssm_state")

    def __init__(
        self,
        d_model: int,
        n_heads: int = 1,
        *,
        d_state: int = 128,
        n_groups: int = 1,
        d_inner: int | None = None,
        chunk_len: int = 256,
        position: Position = "rope",
        rope_base: float = 10000.0,
        rope_layout: Layout = "half",
        conv_width: int | None = None,
        dt_init: DtInit = "mamba2",
        groups: Groups = "interleaved",
        skip: bool = True,
        gate: Gate = "none",
        backend: str = "auto",
    ):
        super().__init__()
        require_one_of("position", position, get_args(Position))
        require_one_of("rope_layout", rope_layout, get_args(Layout))
        require_one_of("dt_init", dt_init, get_args(DtInit))
        require_one_of("groups", groups, get_args(Groups))
        require_one_of("gate", gate, get_args(Gate))
        require_one_of("backend", backend, ("auto", *BACKENDS))
        missing = explain_missing(backend) if backend in PEERS else None
        if missing is not None:
            raise ValueError(f"{backend=}: {missing}")
        for field, value in (
            ("d_model", d_model),
            ("n_heads", n_heads),
            ("n_groups", n_groups),
            ("d_state", d_state),
            ("chunk_len", chunk_len),
        ):
            if value < 1:
                raise ValueError(f"{field}={value} must be at least 1")
        width = d_model if d_inner is None else d_inner
        if width < 1 or width % n_heads:
            field = "d_model" if d_inner is None else "d_inner"
            raise ValueError(f"{field}={width} must be a positive multiple of {n_heads=}")
        if n_heads % n_groups:
            raise ValueError(f"{n_groups=} must divide {n_heads=}")
        if position == "rope" and d_state % 2:
            raise ValueError(f"{d_state=} must be even for position='rope'")
        if conv_width is not None and position != "conv":
            raise ValueError(f"{conv_width=} needs position='conv', not {position=}")
        if conv_width is not None and conv_width < 1:
            raise ValueError(f"{conv_width=} must be at least 1")
        self.n_heads, self.n_groups, self.chunk_len = n_heads, n_groups, chunk_len
        self.position, self.rope_base, self.groups = position, rope_base, groups
        self.rope_layout: Layout = rope_layout
        self.backend = backend

        d_BC = n_groups * d_state
        self.x_proj = nn.Linear(d_model, width, bias=False)
        self.B_proj = nn.Linear(d_model, d_BC, bias=False)
        self.C_proj = nn.Linear(d_model, d_BC, bias=False)
        self.dt_proj = nn.Linear(d_model, n_heads, bias=dt_init == "mamba2")
        self.A_log = None
        if position != "none":
            self.A_log = nn.Parameter(torch.arange(1.0, n_heads + 1).log())
        self.D = nn.Parameter(torch.ones(n_heads)) if skip else None
        self.out_proj = nn.Linear(width, d_model, bias=False)
        if dt_init == "mamba2":
            self._init_as_mamba2()
        self.conv = None
        if position == "conv":
            conv_width = 4 if conv_width is None else conv_width
            self.conv = CausalConvolution(width + 2 * d_BC, conv_width)
        self.z_proj = nn.Linear(d_model, width, bias=False) if gate != "none" else None
        self.norm_weight = nn.Parameter(torch.ones(width)) if gate == "norm" else None

        self.hook_dt = HookPoint()  # [b t h]
        self.hook_log_decay = HookPoint()  # [b t h], ≤ 0
        self.hook_B_pre = HookPoint()  # [b t g n], as the next three: "pre" comes from the
        self.hook_B_rot = HookPoint()  # projection, "rot" goes into the recurrence, whatever
        self.hook_C_pre = HookPoint()  # the position does between them
        self.hook_C_rot = HookPoint()
        self.hook_ssm_write = HookPoint()  # [b t h p n]
        self.hook_ssm_state = HookPoint()  # [b t h p n], after each token, as read by it alone
        self.hook_ssm_out = HookPoint()  # [b t h p], before the gate

    @torch.no_grad()
    def _init_as_mamba2(self) -> None:
        """Draw A from U(−16, −1), and the bias that makes dt log-uniform in [0.001, 0.1]."""
        if self.A_log is not None:
            self.A_log.uniform_(1, 16).log_()
        dt = torch.empty(self.n_heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_proj.bias.copy_(dt.expm1().log())

    @property
    def relative(self) -> bool:
        """Whether outputs depend on distances alone; rotations see no more than those."""
        return True

    @property
    def rotary_pairs(self) -> RotaryPairs | None:
        """How C and B are rotated; None unless position is "rope"."""
        if self.position != "rope":
            return None
        return RotaryPairs(
            sides="C/B",
            target_hook="hook_C_pre",
            source_hook="hook_B_pre",
            decay_hook="hook_log_decay",
            source_of=tuple(range(self.n_groups)),
            comparison_of=tuple(self.group_of_head.tolist()),
            n_pairs=self.C_proj.out_features // self.n_groups // 2,
            base=self.rope_base,
            layout=self.rope_layout,
            scale=1.0,
        )

    @property
    def group_of_head(self) -> Int[Tensor, " h"]:
        """Which group's B and C each head has."""
        head = torch.arange(self.n_heads)
        if self.groups == "tiled":
            return head % self.n_groups
        return head // (self.n_heads // self.n_groups)

    def extra_repr(self) -> str:
        """Return the layer's sizes and readings."""
        d_head = self.x_proj.out_features // self.n_heads
        d_state = self.B_proj.out_features // self.n_groups
        gate = (
            ""
            if self.z_proj is None
            else ", gated norm"
            if self.norm_weight is not None
            else ", gated"
        )
        return (
            f"{self.n_heads} × {d_head}, state {self.n_groups} × {d_state}, "
            f"position {self.position}{gate}, by {self._backend_here}"
        )

    @property
    def _backend_here(self) -> str:
        """The backend by name, "auto" as resolved for the device that the layer is on."""
        if self.backend != "auto":
            return self.backend
        return resolve_backend("auto", self.out_proj.weight.device)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return the mixed sequence, token by token where a hook looks at writes or states."""
        return self.prefill(x)[0]

    def start(self, batch: int, position: int = 0) -> SSDState:
        """Return the state before the first token, which will stand at `position`."""
        weight = self.x_proj.weight
        p = self.x_proj.out_features // self.n_heads
        n = self.B_proj.out_features // self.n_groups
        ssm = weight.new_zeros(batch, self.n_heads, p, n, dtype=_high(weight))
        positions = torch.full((batch,), position, device=weight.device)
        return SSDState(ssm, self._no_tail(ssm), positions)

    def prefill(
        self,
        x: Float[Tensor, "b t d"],
        state: SSDState | None = None,
        keep: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], SSDState]:
        """Return the outputs of further tokens, and the state after them.

        Args:
            x: t ≥ 1 tokens.
            state: what came before them; None: nothing.
            keep: False for padding, wherever it stands: it writes nothing, nothing fades at it,
                and the convolution passes it over.

        Raises:
            ValueError: for a state of another batch or layer, or a mask of another shape.
        """
        check_decoding(x, state, keep, SSDState)
        if keep is not None:
            x = x.masked_fill(~keep[..., None], 0)
        inputs, tail = self._inputs(x, state, keep)
        z, ssm = self._mix(inputs, None if state is None else state.ssm)
        y = self.project(x, rearrange(z, "b t h p -> b h t p"))
        return y, SSDState(ssm, tail, next_position(x, state, keep))

    def step(
        self, x: Float[Tensor, "b d"], state: SSDState
    ) -> tuple[Float[Tensor, "b d"], SSDState]:
        """Return the output of one further token, and the state after it.

        Raises:
            ValueError: for a state of another batch or layer.
        """
        check_decoding(x, state, kind=SSDState)
        x = x[:, None]
        inputs, tail = self._inputs(x, state)
        z, ssm = self._step(inputs, state.ssm)
        y = self.project(x, rearrange(z, "b t h p -> b h t p"))
        return y[:, 0], SSDState(ssm, tail, state.position + 1)

    def matrix(
        self, x: Float[Tensor, "b s d"], rows: slice | None = None
    ) -> Float[Tensor, "b h t s"]:
        """Return M̃, dt on its columns, D on its diagonal, or some rows; quadratic, for analysis."""
        _, dt, log_decay, B, C = self._inputs(x)[0]
        return matrix_from_decay(dt, log_decay, B, C, self.D, rows)

    def values(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b h s p"]:
        """Return what the matrix mixes, convolved where the position is a convolution."""
        return rearrange(self._inputs(x)[0].x, "b s h p -> b h s p")

    def project(
        self, x: Float[Tensor, "b t d"], z: Float[Tensor, "b h t p"]
    ) -> Float[Tensor, "b t d"]:
        """Return the heads' mixed values as an output; x opens the gate, where there is one."""
        z = self.hook_ssm_out(rearrange(z, "b h t p -> b t h p"))
        y = rearrange(z, "b t h p -> b t (h p)")
        if self.z_proj is not None:
            y = y * F.silu(self.z_proj(x).to(y.dtype))
        if self.norm_weight is not None:
            parts = y.unflatten(-1, (self.n_groups, -1))
            y = F.rms_norm(parts, parts.shape[-1:], eps=NORM_EPS).flatten(-2) * self.norm_weight
        return self.out_proj(y.to(x.dtype))

    def _inputs(
        self,
        x: Float[Tensor, "b t d"],
        state: SSDState | None = None,
        keep: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[_Inputs, Float[Tensor, "b w c"]]:
        """Return what the recurrence takes in, and the convolution's tail after it."""
        high = _high(x)
        dt = F.softplus(self.dt_proj(x).to(high))
        if keep is not None:
            dt = dt * keep[..., None]
        dt = self.hook_dt(dt)
        log_decay = self.hook_log_decay(dt * self._decay_rates())
        values = self.x_proj(x).to(high)
        B, C = (
            rearrange(f(x).to(high), "b t (g n) -> b t g n", g=self.n_groups)
            for f in (self.B_proj, self.C_proj)
        )
        B, C = self.hook_B_pre(B), self.hook_C_pre(C)
        tail = self._no_tail(values) if state is None else state.conv
        if self.conv is None and tail.shape[1]:
            raise ValueError(f"state.conv is {tail.shape[1]} wide, must be 0: nothing convolves")
        if self.conv is not None:
            joint = torch.cat([values, B.flatten(-2), C.flatten(-2)], dim=-1)
            joint, tail = self.conv(joint, tail, keep)
            widths = (values.shape[-1], *2 * [self.B_proj.out_features])
            values, B, C = F.silu(joint).split(widths, dim=-1)
            B, C = (z.unflatten(-1, (self.n_groups, -1)) for z in (B, C))
        elif self.position == "rope":
            positions = token_positions(x.shape[1], x.device, state, keep)
            cos, sin = rotary_table(positions, B.shape[-1], self.rope_base, high)
            B, C = (apply_rotary(z, cos, sin, self.rope_layout) for z in (B, C))
        B, C = self.hook_B_rot(B), self.hook_C_rot(C)
        if self.groups == "tiled":
            B, C = (z.repeat(1, 1, self.n_heads // self.n_groups, 1) for z in (B, C))
        values = rearrange(values, "b t (h p) -> b t h p", h=self.n_heads)
        return _Inputs(values, dt, log_decay, B, C), tail

    def _no_tail(self, like: Tensor) -> Float[Tensor, "b w c"]:
        """Return the convolution's inputs before the first token: zeros, or none at all."""
        width = 0 if self.conv is None else self.conv.width - 1
        channels = self.x_proj.out_features + 2 * self.B_proj.out_features
        return like.new_zeros(like.shape[0], width, channels)

    def _decay_rates(self) -> Float[Tensor, " h"]:
        """Return A, in fp32 at least."""
        if self.A_log is None:
            weight = self.dt_proj.weight
            return weight.new_zeros(self.n_heads, dtype=_high(weight))
        return -self.A_log.to(_high(self.A_log)).exp()

    @property
    def _watched(self) -> bool:
        """Whether a hook looks at, or replaces, what the fast forms never make."""
        points = (self.hook_log_decay, self.hook_ssm_write, self.hook_ssm_state)
        return any(point.active for point in points)

    def _mix(
        self, inputs: _Inputs, state: Float[Tensor, "b h p n"] | None
    ) -> tuple[Float[Tensor, "b t h p"], Float[Tensor, "b h p n"]]:
        x, dt, log_decay, B, C = inputs
        if self.hook_ssm_write.active or self.hook_ssm_state.active:
            writes = self.hook_ssm_write(state_writes(x, dt, B))
            states = scan_states(writes, log_decay, state)
            return read_states(self.hook_ssm_state(states), x, C, self.D), states[:, -1]
        if self.hook_log_decay.active:
            # A hook may have put in log-decays that no A gives.
            return ssd_chunked(x, dt, log_decay, B, C, self.D, self.chunk_len, state)
        A = self._decay_rates()
        return ssd(x, dt, A, B, C, self.D, self.chunk_len, state, self.backend)

    def _step(
        self, inputs: _Inputs, state: Float[Tensor, "b h p n"]
    ) -> tuple[Float[Tensor, "b t h p"], Float[Tensor, "b h p n"]]:
        if self._watched:
            return self._mix(inputs, state)
        x, dt, _, B, C = (z[:, 0] for z in inputs)
        z, state = ssd_step(x, dt, self._decay_rates(), B, C, self.D, state)
        return z[:, None], state

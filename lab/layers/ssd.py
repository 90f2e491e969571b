"""The SSD sequence mixer: state space duality, with a choice of position encodings and gates."""

import math
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lab.hooks import HookPoint
from lab.layers.convolution import CausalConvolution
from lab.layers.mixer import Mixer, RotaryPairs, take_positions
from lab.layers.state import check_decoding, next_position, token_positions
from lab.ops.precision import promote
from lab.ops.rope import Layout, apply_rotary, rotary_table
from lab.ops.ssd import BACKENDS, name_backend, ssd, ssd_step
from lab.ops.ssd_chunked import ssd_at, ssd_chunked
from lab.ops.ssd_forms import matrix_from_decay, read_states, scan_states, state_writes
from lab.peers import PEERS, explain_missing
from tasks.bounds import check_choice

NORM_EPS = 1e-5
"""Added to the mean square in the gated norm; the default of mamba-ssm and transformers."""
Position = Literal["rope", "conv", "decay", "none"]
Activation = Literal["auto", "silu", "none"]
Gate = Literal["none", "silu", "norm"]
DtInit = Literal["mamba2", "long", "paper"]
Groups = Literal["interleaved", "tiled"]
LONG_MEMORY = 1024.0
"""Tokens after which the state has fallen to 1/e at the start, with dt_init="long"."""
MEMORIES = (0.01, 1e9)
"""Fewest and most tokens of a memory; far beyond them, fp32 rounds the decay's gradient to 0."""
STEADY_DT = 0.1
"""Initial dt of heads whose memory is given rather than drawn."""


class SSDState(NamedTuple):
    """The state of an SSD layer; its size does not depend on how many tokens it has read.

    Attributes:
        ssm: the state of the recurrence, in fp32 at least.
        conv: the last conv_width − 1 inputs of the convolution, x, B and C side by side, in fp32
            at least (axes as in `lab.layers.convolution`); w = 0 without a convolution.
        position: of the next token.
    """

    ssm: Float[Tensor, "b h p n"]
    conv: Float[Tensor, "b w c"]
    position: Int[Tensor, " b"]


class RecurrenceInputs(NamedTuple):
    """The inputs of the recurrence; all but x have passed their hook points."""

    x: Float[Tensor, "b t h p"]
    dt: Float[Tensor, "b t h"]
    log_decay: Float[Tensor, "b t h"]
    B: Float[Tensor, "b t g n"]
    C: Float[Tensor, "b t g n"]


def draw_log_rates(n: int) -> Float[Tensor, " n"]:
    """Return log A of n rates A from U(1, 16), as Mamba-2 starts."""
    return torch.empty(n).uniform_(1, 16).log()


DT_MIN, DT_MAX = 1e-3, 1e-1
"""Between which dt starts in Mamba-2."""


def draw_dt_bias(n: int, low: float = DT_MIN, high: float = DT_MAX) -> Float[Tensor, " n"]:
    """Return n biases whose softplus is log-uniform in [low, high]."""
    return torch.empty(n).uniform_(math.log(low), math.log(high)).exp().expm1().log()


class SSD(Mixer):
    """Mixes a sequence by h_t = exp(dt_t A) h_{t−1} + dt_t x_t ⊗ B_t, y_t = h_t C_t + D x_t.

    x, B, C and dt are linear in the residual stream, dt followed by a softplus. `position` and
    `activation` are applied to x, B and C, and `gate` to y. Only dt and the convolution have
    biases.
    As one matrix: M̃ = L ∘ CBᵀ ∘ dt + D, and forward(x) = project(x, matrix(x) @ values(x)).

    Args:
        d_model: width d.
        n_heads: heads h, each d_inner / n_heads wide, with its own decay rate A < 0.
        d_state: width n of the state of each channel; even for rotation.
        n_groups: sets g of B and C, each shared by several heads; divides n_heads.
        d_inner: width of all heads' values together; None: d_model. Mamba-2 has 2·d_model.
        chunk_len: tokens of a chunk; affects only the speed.
        position: "rope" rotates B and C by their positions; "conv" applies a causal depthwise
            convolution to x, B and C; "decay" does not change them, so only the decay depends on
            distance; "none" has no decay either (no A, log-decay 0): the layer is linear attention
            whose writes are weighted by dt, and its state grows without bound.
        rope_base: base of the rotation.
        rope_layout: which channels of B and C make a pair.
        conv_width: tokens that the convolution sums over; None: 4 for position="conv".
        activation: "silu" of x, B and C, after a convolution and before a rotation, or "none";
            "auto" is "silu" with a convolution, as in Mamba-2, and else "none". With neither, B and
            C are linear in the stream, so of a state wider than d_model only d_model dimensions are
            used.
        dt_init: "mamba2" draws dt from [0.001, 0.1] and A from [−16, −1] for each head, so that a
            head remembers for one to a thousand tokens, at random; "long" is memory=1024; "paper"
            has A = −1 … −h and no bias: dt is near 0.7 and even the slowest head halves its state
            at each token (erratum S4). With position="none" nothing is forgotten, and only dt
            differs.
        memory: tokens after which the state of every head has fallen to 1/e at the start, with dt
            near 0.1; None: as dt_init says. Training changes it.
        groups: "interleaved" gives neighbouring heads one group (0 0 1 1), as kernels do;
            "tiled" is the listing read literally (0 1 0 1, erratum S3).
        skip: whether D x is added.
        gate: "silu" gives y ⊙ silu(W_z x); "norm" the RMSNorm of that, separately over each of
            n_groups equal parts of d_inner, as in mamba-ssm 2.3.2 and transformers 5.23.
        backend: a name in `lab.ops.ssd`, or "auto". Plain torch computes single steps,
            and whatever hooks read or replace.

    Raises:
        ValueError: for widths that do not divide, an odd d_state under rotation, a conv_width
            below 1 or without a convolution, a memory below 0.01 or above 1e9, without a decay or
            beside another dt_init, unknown names.

    Source: lst:ssd_algorithm_pytorch and the listing after it; eq. rope_cb; § Related Work for
        the other positions.
    """

    # What the layer offers (`lab.layers.mixer`).
    matrix_form = "M̃ = L∘CBᵀ·dt + D"
    takes_rows = takes_positions = True
    heads_hook = "hook_ssm_out"
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
        activation: Activation = "auto",
        dt_init: DtInit = "mamba2",
        memory: float | None = None,
        groups: Groups = "interleaved",
        skip: bool = True,
        gate: Gate = "none",
        backend: str = "auto",
    ):
        super().__init__()
        check_choice("position", position, get_args(Position))
        check_choice("rope_layout", rope_layout, get_args(Layout))
        check_choice("activation", activation, get_args(Activation))
        if activation == "auto":
            activation = "silu" if position == "conv" else "none"
        check_choice("dt_init", dt_init, get_args(DtInit))
        check_choice("groups", groups, get_args(Groups))
        check_choice("gate", gate, get_args(Gate))
        check_choice("backend", backend, ("auto", *BACKENDS))
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
        least, most = MEMORIES
        if memory is not None and not least <= memory <= most:
            raise ValueError(f"{memory=} must be from {least:g} to {most:g} tokens")
        if memory is not None and dt_init != "mamba2":
            raise ValueError(f"{memory=} replaces {dt_init=}: give one of them")
        if memory is not None and position == "none":
            raise ValueError(f"{memory=} needs a decay, not {position=}")
        self.n_heads, self.n_groups, self.chunk_len = n_heads, n_groups, chunk_len
        self.position, self.rope_base, self.groups = position, rope_base, groups
        self.rope_layout: Layout = rope_layout
        self.activation = activation
        self.backend = backend

        d_BC = n_groups * d_state
        self.x_proj = nn.Linear(d_model, width, bias=False)
        self.B_proj = nn.Linear(d_model, d_BC, bias=False)
        self.C_proj = nn.Linear(d_model, d_BC, bias=False)
        self.dt_proj = nn.Linear(d_model, n_heads, bias=dt_init != "paper")
        self.A_log = None
        if position != "none":
            self.A_log = nn.Parameter(torch.arange(1.0, n_heads + 1).log())
        self.D = nn.Parameter(torch.ones(n_heads)) if skip else None
        self.out_proj = nn.Linear(width, d_model, bias=False)
        if memory is not None or dt_init == "long":
            self._init_memory(LONG_MEMORY if memory is None else memory)
        elif dt_init == "mamba2":
            self._init_as_mamba2()
        self.conv = None
        if position == "conv":
            conv_width = 4 if conv_width is None else conv_width
            self.conv = CausalConvolution(width + 2 * d_BC, conv_width)
        self.z_proj = nn.Linear(d_model, width, bias=False) if gate != "none" else None
        self.norm_weight = nn.Parameter(torch.ones(width)) if gate == "norm" else None

        self.hook_dt = HookPoint()  # [b t h]
        self.hook_log_decay = HookPoint()  # [b t h], ≤ 0
        # [b t g n]: "pre" is the projection, after the activation if there is no convolution; "rot"
        # goes into the recurrence, whatever the position does between them.
        self.hook_B_pre, self.hook_B_rot = HookPoint(), HookPoint()
        self.hook_C_pre, self.hook_C_rot = HookPoint(), HookPoint()
        self.hook_ssm_write = HookPoint()  # [b t h p n]
        self.hook_ssm_state = HookPoint()  # [b t h p n], after each token, as read by it alone
        self.hook_ssm_out = HookPoint()  # [b t h p], before the gate

    @torch.no_grad()
    def _init_as_mamba2(self) -> None:
        """Draw A from U(−16, −1), and dt's bias so that dt is log-uniform in [0.001, 0.1]."""
        if self.A_log is not None:
            self.A_log.copy_(draw_log_rates(self.n_heads))
        self.dt_proj.bias.copy_(draw_dt_bias(self.n_heads))

    @torch.no_grad()
    def _init_memory(self, tokens: float) -> None:
        """Let every head start with dt = STEADY_DT, and a state that falls to 1/e in `tokens`."""
        if self.A_log is not None:
            self.A_log.fill_(-math.log(STEADY_DT * tokens))
        self._start_at(torch.full((self.n_heads,), STEADY_DT))

    def _start_at(self, dt: Float[Tensor, " h"]) -> None:
        """Set dt's bias so that it has these values where the projection gives nothing."""
        self.dt_proj.bias.copy_(dt.expm1().log())

    @property
    def group_of_head(self) -> Int[Tensor, " h"]:
        """The group whose B and C each head uses."""
        head = torch.arange(self.n_heads)
        if self.groups == "tiled":
            return head % self.n_groups
        return head // (self.n_heads // self.n_groups)

    @property
    def relative(self) -> bool:
        """Whether outputs depend only on distances between tokens; rotations keep to that."""
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

    def extra_repr(self) -> str:
        """Return the layer's sizes and options."""
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
            f"position {self.position}, activation {self.activation}{gate}, by {self._backend_here}"
        )

    @property
    def _backend_here(self) -> str:
        """The name of the backend that computes."""
        return name_backend(self.backend)

    def forward(
        self, x: Float[Tensor, "b t d"], at: Int[Tensor, "b q"] | None = None
    ) -> Float[Tensor, "b q d"]:
        """Return the mixed sequence; computed token by token when a hook is on writes or states.

        With `at` [b q] only the outputs at those positions are computed, if plain torch does it on
        a CPU: where they are decides the sizes, which an accelerator would wait for.
        """
        if at is None:
            return self.prefill(x)[0]
        read = take_positions(x, at)
        if self._backend_here != "torch" or self._watched or x.device.type != "cpu":
            z = take_positions(self._mix(self._compute_inputs(x)[0], None)[0], at)
        else:
            values, dt, log_decay, B, C = self._compute_inputs(x, at=at)[0]
            z = ssd_at(values, dt, log_decay, B, C, at, self.chunk_len)
            if self.D is not None:
                z = z + self.D.to(z.dtype)[:, None] * take_positions(values, at)
        return self.project(read, rearrange(z, "b q h p -> b h q p"))

    def start(self, batch: int, position: int = 0) -> SSDState:
        """Return the state before the first token, which will stand at `position`."""
        weight = self.x_proj.weight
        p = self.x_proj.out_features // self.n_heads
        n = self.B_proj.out_features // self.n_groups
        ssm = weight.new_zeros(batch, self.n_heads, p, n, dtype=promote(weight))
        positions = torch.full((batch,), position, device=weight.device)
        return SSDState(ssm, self._start_tail(ssm), positions)

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
            keep: False for padding, which may be anywhere: it writes nothing, the state does not
                decay, and the convolution skips it.

        Raises:
            ValueError: for a state of another batch or layer, or a mask of another shape.
        """
        check_decoding(x, state, keep, SSDState)
        if keep is not None:
            x = x.masked_fill(~keep[..., None], 0)
        inputs, tail = self._compute_inputs(x, state, keep)
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
        inputs, tail = self._compute_inputs(x, state)
        z, ssm = self._step(inputs, state.ssm)
        y = self.project(x, rearrange(z, "b t h p -> b h t p"))
        return y[:, 0], SSDState(ssm, tail, state.position + 1)

    def matrix(
        self, x: Float[Tensor, "b s d"], rows: slice | None = None
    ) -> Float[Tensor, "b h t s"]:
        """Return M̃, which includes dt and D, or some of its rows; quadratic, for analysis."""
        _, dt, log_decay, B, C = self._compute_inputs(x)[0]
        return matrix_from_decay(dt, log_decay, B, C, self.D, rows)

    def values(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b h s p"]:
        """Return the values that the matrix mixes, after the convolution and activation."""
        return rearrange(self._compute_inputs(x)[0].x, "b s h p -> b h s p")

    def project(
        self, x: Float[Tensor, "b t d"], z: Float[Tensor, "b h t p"]
    ) -> Float[Tensor, "b t d"]:
        """Return the output for the heads' mixed values; x determines the gate, if there is one."""
        z = self.hook_ssm_out(rearrange(z, "b h t p -> b t h p"))
        y = rearrange(z, "b t h p -> b t (h p)")
        if self.z_proj is not None:
            y = y * F.silu(self.z_proj(x).to(y.dtype))
        if self.norm_weight is not None:
            parts = y.unflatten(-1, (self.n_groups, -1))
            y = F.rms_norm(parts, parts.shape[-1:], eps=NORM_EPS).flatten(-2) * self.norm_weight
        return self.out_proj(y.to(x.dtype))

    @property
    def _watched(self) -> bool:
        """Whether a hook reads or replaces something that the fast forms never compute."""
        points = (self.hook_log_decay, self.hook_ssm_write, self.hook_ssm_state)
        return any(point.active for point in points)

    def _mix(
        self, inputs: RecurrenceInputs, state: Float[Tensor, "b h p n"] | None
    ) -> tuple[Float[Tensor, "b t h p"], Float[Tensor, "b h p n"]]:
        x, dt, log_decay, B, C = inputs
        if self.hook_ssm_write.active or self.hook_ssm_state.active:
            writes = self.hook_ssm_write(state_writes(x, dt, B))
            states = scan_states(writes, log_decay, state)
            return read_states(self.hook_ssm_state(states), x, C, self.D), states[:, -1]
        if self.hook_log_decay.active:
            # A hook may have put in log-decays that no A gives.
            return ssd_chunked(x, dt, log_decay, B, C, self.D, self.chunk_len, state)
        A = self._compute_decay_rates()
        return ssd(x, dt, A, B, C, self.D, self.chunk_len, state, self.backend)

    def _step(
        self, inputs: RecurrenceInputs, state: Float[Tensor, "b h p n"]
    ) -> tuple[Float[Tensor, "b t h p"], Float[Tensor, "b h p n"]]:
        if self._watched:
            return self._mix(inputs, state)
        x, dt, _, B, C = (z[:, 0] for z in inputs)
        z, state = ssd_step(x, dt, self._compute_decay_rates(), B, C, self.D, state)
        return z[:, None], state

    def _compute_inputs(
        self,
        x: Float[Tensor, "b t d"],
        state: SSDState | None = None,
        keep: Bool[Tensor, "b t"] | None = None,
        at: Int[Tensor, "b q"] | None = None,
    ) -> tuple[RecurrenceInputs, Float[Tensor, "b w c"]]:
        """Return the inputs of the recurrence, and the convolution's tail after these tokens.

        With `at`, for a sequence from its start, C is that of some positions alone.
        """
        high = promote(x)
        dt = F.softplus(self.dt_proj(x).to(high))
        if keep is not None:
            dt = dt * keep[..., None]
        dt = self.hook_dt(dt)
        log_decay = self.hook_log_decay(dt * self._compute_decay_rates())
        values = self._activate(self.x_proj(x).to(high))
        # The convolution sums over neighbours, read or not.
        read = x if at is None or self.conv is not None else take_positions(x, at)
        B, C = (
            rearrange(self._activate(f(z).to(high)), "b t (g n) -> b t g n", g=self.n_groups)
            for f, z in ((self.B_proj, x), (self.C_proj, read))
        )
        B, C = self.hook_B_pre(B), self.hook_C_pre(C)
        tail = self._start_tail(values) if state is None else state.conv
        if self.conv is None and tail.shape[1]:
            raise ValueError(
                f"state.conv is {tail.shape[1]} wide, must be 0: the layer has no convolution"
            )
        if self.conv is not None:
            joint = torch.cat([values, B.flatten(-2), C.flatten(-2)], dim=-1)
            joint, tail = self.conv(joint, tail, keep)
            widths = (values.shape[-1], *2 * [self.B_proj.out_features])
            values, B, C = self._activate(joint, convolved=True).split(widths, dim=-1)
            B, C = (z.unflatten(-1, (self.n_groups, -1)) for z in (B, C))
            C = C if at is None else take_positions(C, at)
        elif self.position == "rope":
            positions = token_positions(x.shape[1], x.device, state, keep)
            cos, sin = rotary_table(positions, B.shape[-1], self.rope_base, high)
            B = apply_rotary(B, cos, sin, self.rope_layout)
            cos, sin = (cos, sin) if at is None else (cos[at], sin[at])
            C = apply_rotary(C, cos, sin, self.rope_layout)
        B, C = self.hook_B_rot(B), self.hook_C_rot(C)
        if self.groups == "tiled":
            B, C = (z.repeat(1, 1, self.n_heads // self.n_groups, 1) for z in (B, C))
        values = rearrange(values, "b t (h p) -> b t h p", h=self.n_heads)
        return RecurrenceInputs(values, dt, log_decay, B, C), tail

    def _activate(self, z: Tensor, *, convolved: bool = False) -> Tensor:
        """Apply the activation, which comes after the convolution if there is one."""
        here = convolved == (self.conv is not None)
        return F.silu(z) if here and self.activation == "silu" else z

    def _start_tail(self, like: Tensor) -> Float[Tensor, "b w c"]:
        """Return the convolution's inputs before the first token: zeros; w = 0 without one."""
        width = 0 if self.conv is None else self.conv.width - 1
        channels = self.x_proj.out_features + 2 * self.B_proj.out_features
        return like.new_zeros(like.shape[0], width, channels)

    def _compute_decay_rates(self) -> Float[Tensor, " h"]:
        """Return A, in fp32 at least."""
        if self.A_log is None:
            weight = self.dt_proj.weight
            return weight.new_zeros(self.n_heads, dtype=promote(weight))
        return -self.A_log.to(promote(self.A_log)).exp()

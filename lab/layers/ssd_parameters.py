"""The parameters of an SSD layer, and how it computes the inputs of its recurrence from them."""

import math
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lab.hooks import HookPoint
from lab.layers.convolution import CausalConvolution
from lab.layers.mixer import Mixer, take_positions
from lab.layers.state import token_positions
from lab.ops.precision import promote
from lab.ops.rope import Layout, apply_rotary, rotary_table
from lab.ops.ssd_backends import BACKENDS
from lab.peers import PEERS, explain_missing
from tasks.bounds import check_choice

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


class SSDParameters(Mixer):
    """The parameters and hook points of `lab.layers.ssd.SSD`, which documents the arguments."""

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
            self.A_log.uniform_(1, 16).log_()
        self._start_at(torch.empty(self.n_heads).uniform_(math.log(1e-3), math.log(1e-1)).exp())

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

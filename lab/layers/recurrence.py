"""What the mixers of the family share: a matrix as state that tokens decay, correct and write.

    S_t = (I − e_t m_tᵀ) diag(exp g_t) S_{t−1} + k_t v_tᵀ        o_t = S_tᵀ q_t    (lab.ops.delta)

A mixer of `lab.layers.family` says what each token gives the recurrence (`decide`); from q, k and v
to the output all is here, so that an option has one meaning everywhere.
"""

from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, TypedDict, Unpack, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lab.hooks import HookPoint
from lab.layers.convolution import CausalConvolution
from lab.layers.mixer import Mixer, RotaryPairs, take_positions
from lab.layers.state import check_decoding, next_position, token_positions
from lab.ops.delta import Decay, delta, delta_matrix, delta_states, delta_step
from lab.ops.precision import promote
from lab.ops.rope import apply_rotary, rotary_table
from lab.ops.scan import scan
from tasks.bounds import check_choice

Activation = Literal["none", "silu", "elu1"]
Norm = Literal["none", "l2", "rms"]
Gate = Literal["none", "silu", "sigmoid", "gelu"]
Position = Literal["none", "rope"]
ACTIVATIONS = {"none": lambda z: z, "silu": F.silu, "elu1": lambda z: F.elu(z) + 1}
GATES = {"silu": F.silu, "sigmoid": torch.sigmoid, "gelu": partial(F.gelu, approximate="tanh")}
NORM_EPS, L2_EPS = 1e-5, 1e-6
"""Added to the mean square, and to the sum of squares."""
DIVISOR_EPS = 1e-6
"""Added to what outputs are divided by."""


class Shared(TypedDict, total=False):
    """The options of every mixer of the family; defaults differ (`Recurrence.usual`).

    Attributes:
        d_state: channels n of a head's keys; None: d_model / n_heads.
        d_value: width of all heads' values together; None: d_model.
        conv_width: tokens that a causal depthwise convolution of q, k and v sums over; 0: none.
        activation: of q, k and v, after the convolution: "silu", "elu1" (elu + 1, of q and k alone)
            or "none".
        qk_norm: of each head's q and k: "l2" to length 1, "rms" to length √n, or "none".
        position: "rope" rotates q and k to their positions.
        rope_base: wavelength base of the rotation.
        norm: whether each head's output has an RMSNorm.
        gate: what multiplies the output: "silu", "sigmoid" or "gelu" (its approximation by tanh) of
            a linear map of x, or "none".
        chunk_len: tokens of a chunk; affects only the speed.
    """

    d_state: int | None
    d_value: int | None
    conv_width: int
    activation: Activation
    qk_norm: Norm
    position: Position
    rope_base: float
    norm: bool
    gate: Gate
    chunk_len: int


DEFAULTS = Shared(
    d_state=None,
    d_value=None,
    conv_width=0,
    activation="none",
    qk_norm="none",
    position="none",
    rope_base=10000.0,
    norm=True,
    gate="none",
    chunk_len=64,
)


class RecurrentState(NamedTuple):
    """The state of a mixer of the family; its size does not depend on how many tokens it has read.

    Attributes:
        memory: the state S of the recurrence, in fp32 at least.
        tail: the last inputs of the convolution, q, k and v side by side; w = 0 without one.
        carry: what else a mixer remembers (`Recurrence.prepare`); e = 0 for most.
        position: of the next token.
    """

    memory: Float[Tensor, "b h n p"]
    tail: Float[Tensor, "b w c"]
    carry: Float[Tensor, "b e"]
    position: Int[Tensor, " b"]


class Terms(NamedTuple):
    """What the recurrence gets, as in `lab.ops.delta`, and what outputs are divided by.

    Attributes:
        log_floor: where it is given, the divisor of `normalised` is its absolute value, or the
            exponential of this where that is larger.
        skip: where it is given, `per_channel` or with levels, a token reads skip_t v_t besides.
        scales: of the levels of the past, where there are any (`lab.ops.log_linear`).
    """

    q: Float[Tensor, "b t h n"]
    k: Float[Tensor, "b t *r h n"]
    v: Float[Tensor, "b t *r h p"]
    log_decay: Decay | None = None
    match: Float[Tensor, "b t *r h n"] | None = None
    erase: Float[Tensor, "b t *r h n"] | None = None
    own: Float[Tensor, "b t *r h"] | None = None
    log_floor: Float[Tensor, "b t h"] | None = None
    skip: Float[Tensor, "b t h"] | None = None
    scales: Float[Tensor, "b t h l"] | None = None


def shift(
    x: Float[Tensor, "b t d"],
    last: Float[Tensor, "b d"],
    keep: Bool[Tensor, "b t"] | None = None,
) -> tuple[Float[Tensor, "b t d"], Float[Tensor, "b d"]]:
    """Return for each token the one kept before it, of which `last` is the first, and the last."""
    inputs = torch.cat([last.to(x)[:, None], x], dim=1)
    if keep is None:
        return inputs[:, :-1], x[:, -1].to(last.dtype)
    # Position in `inputs` of the latest kept token: that of each token, and before the first.
    at = torch.arange(1, x.shape[1] + 1, device=x.device) * keep
    at = F.pad(at.cummax(1).values, (1, 0))[..., None]
    found = inputs.take_along_dim(at, dim=1)
    return found[:, :-1], found[:, -1].to(last.dtype)


class Recurrence(Mixer):
    """A mixer of the family: [b t d] → [b t d]. Subclasses define `decide`.

    As one matrix: forward(x) = project(x, matrix(x) @ values(x)).

    Args:
        d_model: width d.
        n_heads: heads h, each with its own state.
        shared: options of `Shared`; those not given are `usual`.

    Raises:
        ValueError: for widths that do not divide, sizes below their bounds, or unknown names.
    """

    usual: ClassVar[Shared] = {}
    """The options in which a mixer differs from `DEFAULTS`."""
    normalised: bool = False
    """Whether outputs are divided by what the same sum gives for values of one."""
    channel_decay: ClassVar[bool] = False
    """Whether key channels decay each at its own rate; a rotation then mixes unlike channels."""
    normed: ClassVar[Literal["head", "all heads", "centred head"]] = "head"
    """What `norm` divides by its root mean square; "centred" has its mean subtracted first."""

    per_channel: ClassVar[bool] = False
    """Whether each channel of the values is a head; q and k are made of them (`find_keys`)."""
    conv_bias: ClassVar[bool] = False
    """Whether the convolution has a bias."""

    carry_width: int = 0
    """Numbers of `RecurrentState.carry`."""
    n_writes: int = 1
    """Keys and values that each token has; a mixer sets it before the base class is set up, and
    `decide` splits the heads of k and v that it then gets."""
    match_before_decay: ClassVar[bool] = False
    """Whether what is corrected is read before the state decays, as in `lab.ops.delta`."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    """Both None `per_channel`."""
    v_proj: nn.Linear

    takes_rows = True
    takes_positions = True
    heads_hook = "hook_z"
    recurrent_hooks = ("hook_state",)
    matrix_form = "M, what each token reads of each value"

    def __init__(self, d_model: int, n_heads: int = 1, **shared: Unpack[Shared]):
        super().__init__()
        unknown = shared.keys() - DEFAULTS.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no option {sorted(unknown)[0]}")
        chosen: Any = {**self.list_defaults(), **shared}
        width = d_model if chosen["d_value"] is None else chosen["d_value"]
        for name, given in (("d_model", d_model), ("d_value", width)):
            parted = name == "d_value" or not self.per_channel
            if given < 1 or n_heads < 1 or (parted and given % n_heads):
                raise ValueError(f"{name}={given} must be a positive multiple of {n_heads=}")
        n = d_model // n_heads if chosen["d_state"] is None else chosen["d_state"]
        for name, value, least in (
            ("d_state", n, 1),
            ("conv_width", chosen["conv_width"], 0),
            ("chunk_len", chosen["chunk_len"], 1),
        ):
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        for name, choices in (
            ("activation", Activation),
            ("qk_norm", Norm),
            ("position", Position),
            ("gate", Gate),
        ):
            check_choice(name, chosen[name], get_args(choices))
        if chosen["position"] == "rope" and n % 2:
            raise ValueError(f"d_state={n} must be even for position='rope'")
        self.n_heads, self.d_state, self.d_value = n_heads, n, width // n_heads
        self.activation, self.qk_norm = chosen["activation"], chosen["qk_norm"]
        self.position, self.rope_base = chosen["position"], chosen["rope_base"]
        self.gate, self.chunk_len = chosen["gate"], chosen["chunk_len"]

        self.widths = self.list_widths(n, width)
        if self.per_channel:
            self.widths[:2] = [0, 0]
        for name, out in zip(("q_proj", "k_proj", "v_proj"), self.widths, strict=True):
            made = nn.Linear(d_model, out, bias=False) if out else None
            self.register_module(name, made)
        self.conv = None
        if chosen["conv_width"]:
            self.conv = CausalConvolution(
                sum(self.widths), chosen["conv_width"], bias=self.conv_bias
            )
        weights = width // n_heads if self.normed == "head" else width
        self.norm_weight = nn.Parameter(torch.ones(weights)) if chosen["norm"] else None
        self.g_proj: nn.Module | None
        self.g_proj = None if self.gate == "none" else nn.Linear(d_model, width, bias=False)
        self.out_proj = nn.Linear(width, d_model, bias=False)

        self.hook_q, self.hook_k = HookPoint(), HookPoint()  # [b t h n], before the rotation
        self.hook_rot_q, self.hook_rot_k = HookPoint(), HookPoint()  # [b t h n]
        self.hook_v = HookPoint()  # [b t h p]
        self.hook_log_decay = HookPoint()  # [b t h] or [b t h n], ≤ 0
        self.hook_beta = HookPoint()  # [b t h], or of each write or channel: what is replaced
        self.hook_match = HookPoint()  # [b t *r h n]; where it is 0, nothing is taken away
        self.hook_state = HookPoint()  # [b t h n p], as each token reads it: after it, or before
        self.hook_z = HookPoint()  # [b t h p], before norm and gate

    @classmethod
    def list_defaults(cls) -> Shared:
        """Return the shared options that it has where none are given."""
        return {**DEFAULTS, **cls.usual}

    def list_widths(self, n: int, width: int) -> list[int]:
        """Return the widths of q, k and v, for n channels of a key and a width of all values."""
        return [self.n_heads * n, self.n_writes * self.n_heads * n, self.n_writes * width]

    def prepare(
        self,
        x: Float[Tensor, "b t d"],
        carry: Float[Tensor, "b e"],
        keep: Bool[Tensor, "b t"] | None,
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Float[Tensor, "b e"]]:
        """Return what q, k, v and `decide` are computed from, x unless defined otherwise.

        Args:
            x: the mixer's input.
            carry: what this returned, as its second value, for the tokens before; at first zeros.
            keep: False for padding.
        """
        return (x, x, x, x), carry

    def find_keys(
        self, v: Float[Tensor, "b t h 1"]
    ) -> tuple[Float[Tensor, "b t h n"], Float[Tensor, "b t h n"]]:
        """Return q and k of channels `per_channel`: ones, unless defined otherwise."""
        ones = torch.ones_like(v).expand(*v.shape[:3], self.d_state)
        return ones, ones

    def normalise(
        self, q: Float[Tensor, "b t h n"], k: Float[Tensor, "b t g n"]
    ) -> tuple[Float[Tensor, "b t h n"], Float[Tensor, "b t g n"]]:
        """Return q and k with the norm that `qk_norm` names."""
        return self._normalise(q), self._normalise(k)

    def decide(
        self,
        x: Float[Tensor, "b t d"],
        q: Float[Tensor, "b t h n"],
        k: Float[Tensor, "b t h n"],
        v: Float[Tensor, "b t h p"],
    ) -> Terms:
        """Return what the recurrence gets, from the mixer's input and its heads' q, k and v."""
        raise NotImplementedError

    @property
    def relative(self) -> bool:
        """Whether outputs depend only on distances between tokens; rotations keep to that.

        Not where the two channels that are rotated together decay at different rates.
        """
        return not (self.channel_decay and self.position == "rope")

    @property
    def state_width(self) -> int:
        """Numbers that the state holds for each channel of the values."""
        return self.d_state

    @property
    def rotary_pairs(self) -> RotaryPairs | None:
        """How q and k are rotated; None unless position is "rope"."""
        if self.position != "rope":
            return None
        heads = tuple(range(self.n_heads))
        return RotaryPairs(
            sides="q/k",
            target_hook="hook_q",
            source_hook="hook_k",
            decay_hook=None,
            source_of=heads,
            comparison_of=heads,
            n_pairs=self.d_state // 2,
            base=self.rope_base,
            layout="half",
            scale=1.0,
        )

    def extra_repr(self) -> str:
        """Return the layer's sizes and options."""
        conv = f", convolution {self.conv.width}" if self.conv is not None else ""
        return (
            f"{self.n_heads} × state {self.d_state} × {self.d_value}, "
            f"position {self.position}{conv}, gate {self.gate}"
        )

    def forward(
        self, x: Float[Tensor, "b t d"], at: Int[Tensor, "b q"] | None = None
    ) -> Float[Tensor, "b q d"]:
        """Return the outputs; with `at` [b q], those at some positions."""
        if at is None:
            return self.prefill(x)[0]
        z = take_positions(self._mix(self._compute(x)[0], None)[0], at)
        return self.project(take_positions(x, at), rearrange(z, "b q h p -> b h q p"))

    def start(self, batch: int, position: int = 0) -> RecurrentState:
        """Return the state before the first token, which will stand at `position`."""
        weight = self.v_proj.weight
        high = promote(weight)
        *sizes, _ = self._list_sizes(batch)
        memory, tail, carry = (weight.new_zeros(size, dtype=high) for size in sizes)
        at = torch.full((batch,), position, device=weight.device)
        return RecurrentState(memory, tail, carry, at)

    def prefill(
        self,
        x: Float[Tensor, "b t d"],
        state: RecurrentState | None = None,
        keep: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], RecurrentState]:
        """Return the outputs of further tokens, and the state after them.

        Args:
            x: t ≥ 1 tokens.
            state: what came before them; None: nothing.
            keep: False for padding, which may be anywhere: it changes no state.

        Raises:
            ValueError: for a state of another batch or layer, or a mask of another shape.
        """
        self._check(x, state, keep)
        if keep is not None:
            x = x.masked_fill(~keep[..., None], 0)
        terms, tail, carry = self._compute(x, state, keep)
        z, memory = self._mix(terms, None if state is None else state.memory)
        y = self.project(x, rearrange(z, "b t h p -> b h t p"))
        return y, RecurrentState(memory, tail, carry, next_position(x, state, keep))

    def step(
        self, x: Float[Tensor, "b d"], state: RecurrentState
    ) -> tuple[Float[Tensor, "b d"], RecurrentState]:
        """Return the output of one further token, and the state after it.

        Raises:
            ValueError: for a state of another batch or layer.
        """
        self._check(x, state)
        x = x[:, None]
        terms, tail, carry = self._compute(x, state)
        z, memory = self._mix(terms, state.memory)
        y = self.project(x, rearrange(z, "b t h p -> b h t p"))
        return y[:, 0], RecurrentState(memory, tail, carry, state.position + 1)

    def list_terms(self, x: Float[Tensor, "b t d"]) -> Terms:
        """Return what the recurrence of whole rows gets; v is the mixer's, without ones."""
        terms = self._compute(x)[0]
        return terms._replace(v=terms.v[..., : self.d_value])

    def divide(self, z: Float[Tensor, "b t h p"], terms: Terms) -> Float[Tensor, "b t h p"]:
        """Return what `terms` read, divided as outputs are; z as it is, if they are not."""
        if not self.normalised:
            return z
        ones = torch.ones_like(terms.v[..., :1])
        total = delta(*terms[:2], ones, *terms[3:6], chunk_len=self.chunk_len)[0]
        return z / _bound_divisor(total, terms.log_floor)

    def matrix(
        self, x: Float[Tensor, "b s d"], rows: slice | None = None
    ) -> Float[Tensor, "b rh t s"]:
        """Return the matrix, or some of its rows; quadratic, for analysis.

        With several writes a token, there is one for each write of each head.
        """
        terms = self._compute(x)[0]
        read: Any = {"match_before_decay": self.match_before_decay, "own": terms.own}
        M = delta_matrix(terms.q, terms.k, *terms[3:6], rows=rows, **read)
        if M.ndim == 5:
            M = rearrange(M, "b h t s r -> b (r h) t s")
        if terms.skip is not None:
            M = M + terms.skip.mT.diag_embed()[:, :, slice(None) if rows is None else rows]
        if not self.normalised:
            return M
        floor = None
        if terms.log_floor is not None:
            floor = terms.log_floor.mT[..., slice(None) if rows is None else rows]
        return M / _bound_divisor(M.sum(-1, keepdim=True), floor)

    def values(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b h s p"]:
        """Return the values that the matrix mixes."""
        v = rearrange(self._compute(x)[0].v, "b s ... p -> b (...) s p")
        return v[..., :-1] if self.normalised else v

    def project(
        self, x: Float[Tensor, "b t d"], z: Float[Tensor, "b h t p"]
    ) -> Float[Tensor, "b t d"]:
        """Return the output for the heads' mixed values; x determines the gate, if there is one."""
        y = self.hook_z(rearrange(z, "b h t p -> b t h p"))
        if self.norm_weight is not None:
            y = self._norm_output(y, self.norm_weight.to(y.dtype))
        y = rearrange(y, "b t h p -> b t (h p)")
        if self.g_proj is not None:
            y = y * GATES[self.gate](self.g_proj(x).to(y.dtype))
        return self.out_proj(y.to(x.dtype))

    def _check(self, x: Tensor, state: RecurrentState | None, keep: Tensor | None = None) -> None:
        check_decoding(x, state, keep, RecurrentState)
        if state is None:
            return
        for name, given, size in zip(state._fields, state, self._list_sizes(len(x)), strict=True):
            if given.shape != size:
                raise ValueError(f"state.{name} is {list(given.shape)}, must be {list(size)}")

    def _list_sizes(self, batch: int) -> tuple[tuple[int, ...], ...]:
        """Return the sizes of what a state holds, as `RecurrentState` lists it."""
        return (
            (batch, self.n_heads, self.state_width, self.d_value + self.normalised),
            (batch, 0 if self.conv is None else self.conv.width - 1, sum(self.widths)),
            (batch, self.carry_width),
            (batch,),
        )

    def _compute(
        self,
        x: Float[Tensor, "b t d"],
        state: RecurrentState | None = None,
        keep: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Terms, Float[Tensor, "b w c"], Float[Tensor, "b e"]]:
        """Return what the recurrence gets, and tail and carry after these tokens."""
        high = promote(x)
        carry = x.new_zeros(len(x), self.carry_width, dtype=high) if state is None else state.carry
        inputs, carry = self.prepare(x, carry, keep)
        projections = self.q_proj, self.k_proj, self.v_proj
        parts = zip(projections, inputs[:3], strict=True)
        joint = torch.cat([f(z) for f, z in parts if f is not None], -1).to(high)
        tail = joint.new_zeros(len(x), 0, joint.shape[-1]) if state is None else state.tail
        if self.conv is not None:
            joint, tail = self.conv(joint, None if state is None else tail, keep)
        q, k, v = joint.split(self.widths, -1)
        activate = ACTIVATIONS[self.activation]
        q, k, v = activate(q), activate(k), v if self.activation == "elu1" else activate(v)
        v = rearrange(v, "b t (h p) -> b t h p", p=self.d_value)
        if self.per_channel:
            q, k = self.find_keys(v)
        else:
            q, k = (rearrange(z, "b t (h n) -> b t h n", n=self.d_state) for z in (q, k))
        q, k = self.normalise(q, k)
        q, k = self.hook_q(q), self.hook_k(k)
        if self.position == "rope":
            positions = token_positions(x.shape[1], x.device, state, keep)
            cos, sin = rotary_table(positions, self.d_state, self.rope_base, high)
            q, k = (apply_rotary(z, cos, sin, "half") for z in (q, k))
        terms = self.decide(inputs[-1], self.hook_rot_q(q), self.hook_rot_k(k), self.hook_v(v))
        if terms.match is not None:
            terms = terms._replace(match=self.hook_match(terms.match))
        if self.normalised:
            terms = terms._replace(v=F.pad(terms.v, (0, 1), value=1.0))
        if keep is not None:
            masked: Any = (
                None if z is None else z.masked_fill(~keep[(...,) + (None,) * (z.ndim - 2)], 0)
                for z in terms
            )
            terms = Terms(*masked)
        return terms, tail, carry

    def _normalise(self, z: Float[Tensor, "b t h n"]) -> Float[Tensor, "b t h n"]:
        if self.qk_norm == "l2":
            return z * (z.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()
        return F.rms_norm(z, z.shape[-1:], eps=NORM_EPS) if self.qk_norm == "rms" else z

    def _norm_output(self, y: Float[Tensor, "b t h p"], weight: Float[Tensor, " w"]) -> Tensor:
        if self.normed == "all heads":
            return F.rms_norm(y, y.shape[-2:], weight.view(y.shape[-2:]), NORM_EPS)
        if self.normed == "head":
            return F.rms_norm(y, y.shape[-1:], eps=NORM_EPS) * weight
        return F.layer_norm(y, y.shape[-1:], eps=NORM_EPS) * weight.view(y.shape[-2:])

    def _mix(
        self, terms: Terms, memory: Float[Tensor, "b h n s"] | None
    ) -> tuple[Float[Tensor, "b t h p"], Float[Tensor, "b h n s"]]:
        how: Any = {"match_before_decay": self.match_before_decay}
        if self.per_channel or self.hook_state.active:
            z, memory = self._read_states(terms, memory)
        elif terms.q.shape[1] == 1 and memory is not None:
            now: list[Any] = [None if z is None else z[:, 0] for z in (terms.own, *terms[:6])]
            z, memory = delta_step(*now[1:], state=memory, own=now[0], **how)
            z = z[:, None]
        else:
            how |= {"own": terms.own, "chunk_len": self.chunk_len}
            z, memory = delta(*terms[:6], initial_state=memory, **how)
        if terms.skip is not None:
            z = z + terms.skip[..., None] * terms.v
        return self._divide(z, terms), memory

    def _read_states(
        self, terms: Terms, memory: Float[Tensor, "b h n s"] | None
    ) -> tuple[Float[Tensor, "b t h s"], Float[Tensor, "b h n s"]]:
        """Return what is read of the states, which a hook may replace, and the last state."""
        if self.per_channel:
            states = _scan_channels(terms, memory)
        else:
            how: Any = {"match_before_decay": self.match_before_decay}
            states = delta_states(*terms[1:6], initial_state=memory, **how)
        last = states[:, -1]
        if terms.own is not None:  # the state before a token is read
            before = torch.zeros_like(last) if memory is None else memory
            states = torch.cat([before[:, None], states[:, :-1]], 1)
        states, q = self.hook_state(states), terms.q.to(states)
        if states.shape[-1] == 1:  # matrices of one column are slow to multiply
            z = (states * q[..., None]).sum(-2)
        else:
            z = torch.einsum("bthnp,bthn->bthp", states, q)
        if terms.own is not None:
            own = terms.own[..., None] * terms.v
            z = z + (own.sum(2) if own.ndim == 5 else own)
        return z, last

    def _divide(self, z: Float[Tensor, "b t h s"], terms: Terms) -> Float[Tensor, "b t h _"]:
        if not self.normalised:
            return z
        return z[..., :-1] / _bound_divisor(z[..., -1:], terms.log_floor)


def _scan_channels(
    terms: Terms, memory: Float[Tensor, "b h n 1"] | None
) -> Float[Tensor, "b t h n 1"]:
    """Return the state after each token, where each channel is a head and nothing is erased."""
    k, log_decay = terms.k, terms.log_decay
    assert log_decay is not None
    decay = log_decay.exp() if log_decay.ndim == 4 else log_decay.exp()[..., None]
    before = None if memory is None else memory[..., 0]
    return scan(decay.expand_as(k), k * terms.v, before)[..., None]


def _bound_divisor(total: Tensor, log_floor: Tensor | None) -> Tensor:
    if log_floor is None:
        return total + DIVISOR_EPS
    return torch.maximum(total.abs(), log_floor.exp()[..., None])

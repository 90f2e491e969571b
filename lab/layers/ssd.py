"""The SSD sequence mixer: state space duality, with a choice of position encodings and gates."""

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lab.layers.mixer import RotaryPairs, take_positions
from lab.layers.ssd_parameters import RecurrenceInputs, SSDParameters, SSDState
from lab.layers.state import check_decoding, next_position
from lab.ops.precision import promote
from lab.ops.ssd import ssd, ssd_step
from lab.ops.ssd_at import ssd_at
from lab.ops.ssd_backends import name_backend
from lab.ops.ssd_chunked import ssd_chunked
from lab.ops.ssd_forms import matrix_from_decay, read_states, scan_states, state_writes

NORM_EPS = 1e-5
"""Added to the mean square in the gated norm; the default of mamba-ssm and transformers."""


class SSD(SSDParameters):
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
        backend: a name in `lab.ops.ssd_backends`, or "auto". Plain torch computes single steps,
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

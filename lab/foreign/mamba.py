"""Mamba and Mamba-2 of transformers, flash-linear-attention or mamba-ssm, each as one matrix.

All three libraries give the parts of these layers the same names: in_proj, conv1d, A_log, D,
out_proj. The forms here read those parts, and leave the forward pass to the library.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from lab.foreign.mixer import ForeignMixer
from lab.hooks import HookPoint
from lab.ops.precision import promote
from lab.ops.ssd_forms import matrix_from_decay, read_states, scan_states, state_writes


def selective_scan_states(
    writes: Float[Tensor, "b t h p n"], log_decay: Float[Tensor, "b t h n"]
) -> Float[Tensor, "b t h p n"]:
    """Return the state after each token: h_t = exp(a_t) ∘ h_{t−1} + write_t."""
    h = writes.shape[2]
    states = scan_states(
        rearrange(writes, "b t h p n -> b t (h n) p 1"),
        rearrange(log_decay, "b t h n -> b t (h n)"),
    )
    return rearrange(states, "b t (h n) p 1 -> b t h p n", h=h)


def selective_scan_matrix(
    dt: Float[Tensor, "b s h"],
    log_decay: Float[Tensor, "b s h n"],
    B: Float[Tensor, "b s 1 n"],
    C: Float[Tensor, "b s 1 n"],
    D: Float[Tensor, " h"] | None = None,
    rows: slice | None = None,
) -> Float[Tensor, "b h t s"]:
    """Return M of y = M x for each channel, or some of its rows.

    M_ts = Σ_n C_tn exp(Σ_{s<k≤t} dt_k A_n) B_sn dt_s + D δ_ts for s ≤ t, else 0.
    """
    parts = zip(log_decay.unbind(-1), B.split(1, -1), C.split(1, -1), strict=True)
    matrix = None
    for entry, (decay, write, read) in enumerate(parts):
        part = matrix_from_decay(dt, decay, write, read, None if entry else D, rows)
        matrix = part if matrix is None else matrix + part
    assert matrix is not None
    return matrix


class ScanInputs(NamedTuple):
    """What a recurrence reads, per head; in Mamba a head is one channel, p = 1.

    Attributes:
        x: what tokens write.
        dt: step sizes, > 0.
        log_decay: of the state, < 0; in Mamba one for each entry n.
        B: where tokens write.
        C: where tokens read.
        gate: what the output is multiplied by, before its activation.
    """

    x: Float[Tensor, "b t h p"]
    dt: Float[Tensor, "b t h"]
    log_decay: Float[Tensor, "b t h"] | Float[Tensor, "b t h n"]
    B: Float[Tensor, "b t g n"]
    C: Float[Tensor, "b t g n"]
    gate: Float[Tensor, "b t h_p"]


class ForeignScan(ForeignMixer):
    """A foreign state space layer; forward(x) = project(x, matrix(x) @ values(x)).

    Without hooks, the library computes the output. Hooks on what the recurrence reads, writes and
    holds make the layer compute it here, token by token.
    """

    takes_rows = True
    recurrent_hooks = ("hook_ssm_write", "hook_ssm_state")
    module: Any

    def __init__(self, module: nn.Module, rehearse: Callable[[Tensor], object] | None = None):
        super().__init__(module, rehearse)
        self.hook_dt = HookPoint()  # [b t h]
        self.hook_log_decay = HookPoint()  # [b t h], in Mamba [b t h n]
        self.hook_B_pre = HookPoint()  # [b t g n]
        self.hook_C_pre = HookPoint()  # [b t g n]
        self.hook_ssm_write = HookPoint()  # [b t h p n]
        self.hook_ssm_state = HookPoint()  # [b t h p n], after each token
        self.hook_ssm_out = HookPoint()  # [b t h p], before the gate

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return the mixed sequence."""
        watched = any(isinstance(m, HookPoint) and m.active for m in self.children())
        if not watched:
            return self.run(x)
        inputs = self._compute_inputs(x)
        writes = self.hook_ssm_write(state_writes(inputs.x, inputs.dt, inputs.B))
        states = self.hook_ssm_state(self._scan(writes, inputs.log_decay))
        z = read_states(states, inputs.x, inputs.C, self.module.D)
        return self._project(inputs, z).to(x.dtype)

    def values(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b h s p"]:
        """Return the values that the matrix mixes, after the convolution."""
        return rearrange(self._compute_inputs(x).x, "b s h p -> b h s p")

    def project(
        self, x: Float[Tensor, "b t d"], z: Float[Tensor, "b h t p"]
    ) -> Float[Tensor, "b t d"]:
        """Return the output for the mixed values; x determines the gate."""
        y = self._project(self._compute_inputs(x), rearrange(z, "b h t p -> b t h p"))
        return y.to(x.dtype)

    def _project(self, inputs: ScanInputs, z: Float[Tensor, "b t h p"]) -> Float[Tensor, "b t d"]:
        y = self._apply_gate(rearrange(self.hook_ssm_out(z), "b t h p -> b t (h p)"), inputs.gate)
        return self.module.out_proj(y.to(self.module.out_proj.weight.dtype))

    def _convolve(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t c"]:
        """Return the causal convolution of x, after its activation."""
        return self.module.act(self.module.conv1d(x.mT)[..., : x.shape[1]]).mT

    def _watch(self, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, gate: Tensor) -> ScanInputs:
        """Return the inputs of the recurrence, in fp32 at least, after their hook points."""
        self.refuse_decoding("pass hook points")
        high = promote(x)
        dt = self.hook_dt(dt.to(high))
        A = -self.module.A_log.to(high).exp()
        log_decay = self.hook_log_decay(dt[..., None] * A if A.ndim > 1 else dt * A)
        B, C = self.hook_B_pre(B.to(high)), self.hook_C_pre(C.to(high))
        return ScanInputs(x.to(high), dt, log_decay, B, C, gate)

    @abstractmethod
    def _compute_inputs(self, x: Float[Tensor, "b t d"]) -> ScanInputs:
        """Return what the recurrence reads."""

    @abstractmethod
    def _scan(self, writes: Tensor, log_decay: Tensor) -> Float[Tensor, "b t h p n"]:
        """Return the state after each token."""

    @abstractmethod
    def _apply_gate(
        self, y: Float[Tensor, "b t h_p"], gate: Float[Tensor, "b t h_p"]
    ) -> Float[Tensor, "b t h_p"]:
        """Return the gated output, normed where the layer has a norm."""


class ForeignMamba(ForeignScan):
    """A Mamba layer, also of Falcon-Mamba or Jamba: every channel is a head. [b t d] → [b t d]."""

    matrix_form = "M = Σₙ C exp(Σ dt·A) B·dt + D, per channel"

    def matrix(
        self, x: Float[Tensor, "b s d"], rows: slice | None = None
    ) -> Float[Tensor, "b h t s"]:
        """Return each channel's matrix, or some of its rows; quadratic, for analysis."""
        inputs = self._compute_inputs(x)
        return selective_scan_matrix(
            inputs.dt, inputs.log_decay, inputs.B, inputs.C, self.module.D, rows
        )

    def _compute_inputs(self, x: Float[Tensor, "b t d"]) -> ScanInputs:
        module, n = self.module, self.module.A_log.shape[1]
        u, gate = module.in_proj(x).chunk(2, dim=-1)
        u = self._convolve(u)
        rank = module.dt_proj.in_features
        read = module.x_proj(u).split([rank, n, n], dim=-1)
        # Falcon-Mamba and Jamba norm what the recurrence is told.
        norms = (getattr(module, f"{name}_layernorm", nn.Identity()) for name in ("dt", "b", "c"))
        dt, B, C = (norm(z) for norm, z in zip(norms, read, strict=True))
        dt = F.softplus(module.dt_proj(dt))
        return self._watch(u[..., None], dt, B[:, :, None], C[:, :, None], gate)

    def _scan(self, writes: Tensor, log_decay: Tensor) -> Tensor:
        return selective_scan_states(writes, log_decay)

    def _apply_gate(self, y: Tensor, gate: Tensor) -> Tensor:
        return y * F.silu(gate)


class ForeignMamba2(ForeignScan):
    """A Mamba-2 layer: state space duality. [b t d] → [b t d]."""

    matrix_form = "M̃ = L∘CBᵀ·dt + D"
    heads_hook = "hook_ssm_out"

    def matrix(
        self, x: Float[Tensor, "b s d"], rows: slice | None = None
    ) -> Float[Tensor, "b h t s"]:
        """Return each head's matrix, or some of its rows; quadratic, for analysis."""
        inputs = self._compute_inputs(x)
        return matrix_from_decay(
            inputs.dt, inputs.log_decay, inputs.B, inputs.C, self.module.D, rows
        )

    def _compute_inputs(self, x: Float[Tensor, "b t d"]) -> ScanInputs:
        module, heads = self.module, len(self.module.A_log)
        width, channels = module.out_proj.in_features, module.conv1d.in_channels
        groups = _get(module, "n_groups", "ngroups")
        # Falcon-H1 puts factors on what it reads.
        read = module.in_proj(x * getattr(module, "ssm_in_multiplier", 1))
        read = read * getattr(module, "mup_vector", 1)
        gate, mixed, dt = read.split([width, channels, heads], dim=-1)
        n = (channels - width) // 2
        u, B, C = self._convolve(mixed).split([width, n, n], dim=-1)
        dt = F.softplus(dt + module.dt_bias).clamp(*_get(module, "time_step_limit", "dt_limit"))
        B, C = (z.unflatten(-1, (groups, -1)) for z in (B, C))
        return self._watch(u.unflatten(-1, (heads, -1)), dt, B, C, gate)

    def _scan(self, writes: Tensor, log_decay: Tensor) -> Tensor:
        return scan_states(writes, log_decay)

    def _apply_gate(self, y: Tensor, gate: Tensor) -> Tensor:
        norm = self.module.norm
        if norm is None or isinstance(norm, nn.Identity):
            return y * F.silu(gate)
        return norm(y, gate)


MAMBA = ("in_proj", "conv1d", "x_proj", "dt_proj", "A_log", "D", "out_proj")
MAMBA_2 = ("in_proj", "conv1d", "dt_bias", "A_log", "D", "norm", "out_proj")
"""The parts by which a layer is recognised."""


def find_scan_class(module: nn.Module) -> type[ForeignScan] | None:
    """Return the form of a layer with the parts of a Mamba or a Mamba-2; None for another layer."""
    names = {name for name in (*MAMBA, *MAMBA_2) if getattr(module, name, None) is not None}
    if names >= set(MAMBA):
        return ForeignMamba
    return ForeignMamba2 if names >= set(MAMBA_2) - {"norm"} else None


def _get(module: nn.Module, *names: str) -> Any:
    """Return the first of several attributes that a module has."""
    return next(getattr(module, name) for name in names if name in vars(module))

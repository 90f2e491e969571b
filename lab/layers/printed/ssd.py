"""State space duality with the printed sum over chunks.

Axis letter, besides the package's: z the chunk that a state is carried to, c the one it is from.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn

from lab.ops.rope import rotate
from lab.ops.ssd_decay import segment_sums

Summed = Literal["source", "target"]


def ssd_by_chunk_matrix(
    x: Float[Tensor, "b t h p"],
    dt: Float[Tensor, "b t h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b t n"],
    C: Float[Tensor, "b t n"],
    chunk_len: int,
    summed: Summed,
) -> Float[Tensor, "b t h p"]:
    """Return y of state space duality, states carried over by one matrix E between chunk borders.

    Border z lies before chunk z, border c + 1 after chunk c, whose tokens write S_{c+1}; S_0 = 0.
    With E_zc = exp(log-decay from border c to border z), zero for z < c, chunk z starts from

        Σ_c E_zc S_c    summed over the "source": what its past left
        Σ_c E_cz S_z    summed over the "target", as printed: the last chunk's write alone, times
                        decays that lie after it

    Source: lst:ssd_algorithm_pytorch, erratum S2.
    """
    t = x.shape[1]
    values, log_decay = x * dt[..., None], dt * A
    # Padded tokens write nothing and keep the state.
    pad = -t % chunk_len
    values = F.pad(values, (0, 0, 0, 0, 0, pad))
    log_decay, B, C = (F.pad(y, (0, 0, 0, pad)) for y in (log_decay, B, C))
    values = rearrange(values, "b (c l) h p -> b c h l p", l=chunk_len)
    log_decay = rearrange(log_decay, "b (c l) h -> b c h l", l=chunk_len)
    B, C = (rearrange(y, "b (c l) n -> b c l n", l=chunk_len) for y in (B, C))

    L = segment_sums(log_decay).exp()
    y = einsum(L, C, B, values, "b c h l s, b c l n, b c s n, b c h s p -> b c l h p")

    written = einsum(L[..., -1, :], values, B, "b c h s, b c h s p, b c s n -> b c h p n")
    states = torch.cat([torch.zeros_like(written[:, :1]), written], dim=1)
    over_chunk = F.pad(rearrange(log_decay.sum(-1), "b c h -> b h c"), (1, 0))
    E = segment_sums(over_chunk).exp()
    kept = "z" if summed == "source" else "c"
    starts = einsum(E, states, f"b h z c, b c h p n -> b {kept} h p n")[:, :-1]
    faded = log_decay.cumsum(-1).exp()
    y = y + einsum(faded, C, starts, "b c h l, b c l n, b c h p n -> b c l h p")
    return rearrange(y, "b c l h p -> b (c l) h p")[:, :t]


class TargetSummedSSD(nn.Module):
    """SSD whose states are summed over the chunk they go to, not the one they come from.

    Right while the sequence fits one chunk. Beyond that a chunk forgets all but its neighbour's
    write, and scales that by the decays of its own tokens and all later ones: wrong, and an output
    moves with tokens after it (erratum S2). B and C are shared by all heads, with rotary positions.

    Args:
        d_model: width d; each head is d_model / n_heads wide.
        n_heads: heads h.
        d_state: width n of B and C, even.
        chunk_len: tokens of a chunk; here it changes the function.
        rope_base: base of the rotation.

    Raises:
        ValueError: for widths that do not divide, an odd d_state, a chunk_len below one.

    Source: lst:ssd_algorithm_pytorch and the listing after it. Departs: dt starts near 0.05 and
        A at −1, so that more than one token reaches over a border (erratum S4).
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int = 1,
        *,
        d_state: int = 128,
        chunk_len: int = 16,
        rope_base: float = 10000.0,
    ):
        super().__init__()
        if d_model < 1 or n_heads < 1 or d_model % n_heads:
            raise ValueError(f"{d_model=} must be a positive multiple of {n_heads=}")
        if d_state < 2 or d_state % 2:
            raise ValueError(f"{d_state=} must be even and positive")
        if chunk_len < 1:
            raise ValueError(f"{chunk_len=} must be at least 1")
        self.n_heads, self.chunk_len, self.rope_base = n_heads, chunk_len, rope_base
        self.x_proj = nn.Linear(d_model, d_model, bias=False)
        self.B_proj = nn.Linear(d_model, d_state, bias=False)
        self.C_proj = nn.Linear(d_model, d_state, bias=False)
        self.dt_proj = nn.Linear(d_model, n_heads)
        nn.init.constant_(self.dt_proj.bias, -3.0)
        self.A_log = nn.Parameter(torch.zeros(n_heads))
        self.D = nn.Parameter(torch.ones(n_heads))
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return the mixed sequence."""
        positions = torch.arange(x.shape[1], device=x.device)
        B, C = (
            rotate(f(x)[:, :, None], positions, self.rope_base)[:, :, 0]
            for f in (self.B_proj, self.C_proj)
        )
        values = rearrange(self.x_proj(x), "b t (h p) -> b t h p", h=self.n_heads)
        dt = F.softplus(self.dt_proj(x))
        y = ssd_by_chunk_matrix(values, dt, -self.A_log.exp(), B, C, self.chunk_len, "target")
        return self.out_proj(rearrange(y + self.D[:, None] * values, "b t h p -> b t (h p)"))

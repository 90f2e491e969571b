"""Hyena: a convolution as long as the row, between two gates; a small network makes its filter."""

import math
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lab.hooks import HookPoint
from lab.layers.convolution import CausalConvolution
from lab.layers.mixer import Mixer, take_positions
from lab.layers.state import check_decoding, next_position
from lab.ops.long_convolution import convolve, toeplitz
from lab.ops.precision import call_promoted, promote

SLOWEST, FASTEST = 1.5, 0.3
"""Shares of `filter_len` after which the windows of channels are at `REMAINS`."""
REMAINS = 0.01


class HyenaState(NamedTuple):
    """The state of a Hyena mixer, which grows with the number of tokens.

    Attributes:
        past: all that was convolved so far, the latest last; zeros before the first token.
        tail: the last inputs of the short convolution.
        position: of the next token.
    """

    past: Float[Tensor, "b s d"]
    tail: Float[Tensor, "b w c"]
    position: Int[Tensor, " b"]


class Hyena(Mixer):
    """y_t = q_t ⊙ (Σ_{s≤t} f_{t−s} ⊙ k_s ⊙ v_s + D ⊙ k_t ⊙ v_t), then `out`; q, k, v each d wide.

    q, k and v are linear in x and pass a short convolution. f_i is a network of sines of i / L and
    its cosines and sines, times a window exp(−α i / L) with another α for each channel.

    Each channel is a head of the matrix.

    Args:
        d_model: width d.
        filter_len: L; to longer rows the filters extend, faded.
        filter_width: width of the network's layers.
        n_bands: frequencies of which the network sees cosine and sine, ≥ 1.
        conv_width: tokens that the short convolution sums over.

    Raises:
        ValueError: for a size below 1.

    Source: Poli et al. 2023 (2302.10866), § 3, of order 2; sizes and windows are their code's.
    Departs: linear maps have no bias.
    """

    matrix_form = "diag(q) T(f) diag(k), T a Toeplitz matrix, per channel"
    takes_rows = takes_positions = True
    heads_hook = "hook_z"
    input_hooks = ("hook_q", "hook_k", "hook_v")
    relative = True

    def __init__(
        self,
        d_model: int,
        *,
        filter_len: int = 1024,
        filter_width: int = 64,
        n_bands: int = 1,
        conv_width: int = 3,
    ):
        super().__init__()
        for name, given in (
            ("d_model", d_model),
            ("filter_len", filter_len),
            ("filter_width", filter_width),
            ("n_bands", n_bands),
            ("conv_width", conv_width),
        ):
            if given < 1:
                raise ValueError(f"{name}={given} must be at least 1")
        self.filter_len, self.n_bands = filter_len, n_bands
        self.in_proj = nn.Linear(d_model, 3 * d_model, bias=False)
        self.conv = CausalConvolution(3 * d_model, conv_width)
        widths = [1 + 2 * n_bands, filter_width, filter_width, filter_width]
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))
        self.frequency = nn.Parameter(torch.ones(filter_width))
        self.taps = nn.Linear(filter_width, d_model, bias=False)
        self.D = nn.Parameter(torch.randn(d_model))
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.hook_q, self.hook_k, self.hook_v = HookPoint(), HookPoint(), HookPoint()  # [b t h 1]
        self.hook_z = HookPoint()  # [b t h 1]

    def extra_repr(self) -> str:
        """Return the layer's sizes."""
        return f"{self.D.numel()} filters of {self.filter_len}"

    def make_filter(self, t: int, dtype: torch.dtype) -> Float[Tensor, "t d"]:
        """Return f_0 … f_{t−1}, D being added to f_0."""
        D = self.D.to(dtype)
        i = torch.arange(t, device=D.device, dtype=torch.float64)[:, None]
        turn = 2 * math.pi / self.filter_len
        first, last = 1e-4 * turn, max(self.n_bands - 1, 1e-4) * turn
        angles = i * torch.linspace(first, last, self.n_bands, dtype=i.dtype, device=D.device)
        share = i / max(self.filter_len - 1, 1)
        z = torch.cat([share, angles.cos(), -angles.sin()], -1).to(dtype)
        share = share.to(dtype)
        for layer in self.layers:
            z = call_promoted(layer, z)
            z = (self.frequency.to(z) * z).sin()
        slowest, fastest = (-math.log(REMAINS) / after for after in (SLOWEST, FASTEST))
        rates = torch.linspace(slowest, fastest, len(D), dtype=dtype, device=D.device)
        taps = call_promoted(self.taps, z) * (-rates * share).exp()
        return torch.cat([taps[:1] + D, taps[1:]])

    def forward(
        self, x: Float[Tensor, "b t d"], at: Int[Tensor, "b q"] | None = None
    ) -> Float[Tensor, "b q d"]:
        """Return the outputs; with `at` [b q], those at some positions."""
        y, _ = self.prefill(x)
        return y if at is None else take_positions(y, at)

    def start(self, batch: int, position: int = 0) -> HyenaState:
        """Return the state before the first token, which will stand at `position`."""
        weight = self.out.weight
        past, tail = (
            weight.new_zeros(batch, length, width, dtype=promote(weight))
            for length, width in ((0, len(weight)), (self.conv.width - 1, 3 * len(weight)))
        )
        return HyenaState(past, tail, torch.full((batch,), position, device=weight.device))

    def prefill(
        self,
        x: Float[Tensor, "b t d"],
        state: HyenaState | None = None,
        keep: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], HyenaState]:
        """Return the outputs of further tokens, and the state after them.

        Raises:
            ValueError: for a state of another batch or layer, or a mask of another shape.
        """
        check_decoding(x, state, keep, HyenaState)
        if state is not None and state.past.shape[2] != self.out.in_features:
            raise ValueError(f"state.past is {list(state.past.shape)}: it is of another layer")
        before = self.start(len(x)) if state is None else state
        q, k, v, tail = self._compute(x, before.tail, keep)
        written, held, order = (k * v)[..., 0], before.past.shape[1], None
        if keep is not None:
            written = written.masked_fill(~keep[..., None], 0)
        past = torch.cat([before.past.to(written), written], 1)
        if keep is not None:  # padding first: zeros there write nothing and part no tokens
            order = F.pad(keep.long(), (held, 0), value=1).argsort(dim=1, stable=True)[..., None]
            past = past.take_along_dim(order, 1)
        taps = self.make_filter(past.shape[1], past.dtype)
        if order is None and x.shape[1] == 1:
            z = torch.einsum("bsc,sc->bc", past, taps.flip(0))[:, None]
        else:
            z = convolve(past, taps)
            z = (z if order is None else z.take_along_dim(order.argsort(dim=1), 1))[:, held:]
        y = self.project(x, rearrange(q * z[..., None], "b t h p -> b h t p"))
        return y, HyenaState(past, tail, next_position(x, state, keep))

    def step(
        self, x: Float[Tensor, "b d"], state: HyenaState
    ) -> tuple[Float[Tensor, "b d"], HyenaState]:
        """Return the output of one further token, and the state after it."""
        y, state = self.prefill(x[:, None], state)
        return y[:, 0], state

    def matrix(
        self, x: Float[Tensor, "b s d"], rows: slice | None = None
    ) -> Float[Tensor, "b h t s"]:
        """Return each channel's matrix, or some of its rows; quadratic, for analysis."""
        q, k, _, _ = self._compute(x)
        some = slice(None) if rows is None else rows
        T = toeplitz(self.make_filter(x.shape[1], q.dtype))[:, some]
        return q[:, some].permute(0, 2, 1, 3) * T * k.permute(0, 2, 3, 1)

    def values(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b h s p"]:
        """Return v, which the matrices mix."""
        return rearrange(self._compute(x)[2], "b s h p -> b h s p")

    def project(
        self, x: Float[Tensor, "b _ d"], z: Float[Tensor, "b h t p"]
    ) -> Float[Tensor, "b t d"]:
        """Return the channels' mixed values as an output."""
        z = self.hook_z(rearrange(z, "b h t p -> b t h p"))
        return self.out(z[..., 0].to(x.dtype))

    def _compute(self, x, tail=None, keep=None):
        """Return q, k and v [b t h 1], and the tail after these tokens."""
        joint, tail = self.conv(self.in_proj(x).to(promote(x)), tail, keep)
        hooks = (self.hook_q, self.hook_k, self.hook_v)
        q, k, v = (hook(z[..., None]) for hook, z in zip(hooks, joint.chunk(3, -1), strict=True))
        return q, k, v, tail

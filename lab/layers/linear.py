"""Linear attention: a sum over the past in place of a softmax, with a state that does not grow."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lab.hooks import HookPoint
from lab.layers.mixer import Mixer, take_positions
from lab.layers.state import check_decoding, next_position
from lab.ops.precision import promote
from lab.ops.ssd_chunked import ssd_at, ssd_chunked

EPS = 1e-6
"""Added to the sum of a row's weights, as in the authors' code."""
CHUNK_LEN = 64


class LinearState(NamedTuple):
    """The state of a linear attention layer; its size does not depend on how many tokens it read.

    Attributes:
        sums: Σ_s (v_s, 1) φ(k_s)ᵀ, in fp32 at least; the last row is the sum of φ(k).
        position: of the next token.
    """

    sums: Float[Tensor, "b h p_1 n"]
    position: Int[Tensor, " b"]


class LinearAttention(Mixer):
    """Causal linear attention: y_t = Σ_{s≤t} φ(q_t)·φ(k_s) v_s / Σ_{s≤t} φ(q_t)·φ(k_s), then `out`.

    q, k, v and out are linear maps without bias, and φ(x) = elu(x) + 1 > 0. The sums pass through a
    state of p + 1 by n numbers a head, p = n, with a value of one beside v for the divisor; no
    decay bounds it, so it grows with the number of tokens. The layer knows no positions, but that
    later tokens have more before them.

    Args:
        d_model: width of the residual stream.
        n_heads: heads, each d_model / n_heads wide.
        normalise: whether to divide by the sum of the weights.

    Raises:
        ValueError: for a width that the heads do not divide.

    Source: Katharopoulos et al. 2020 (2006.16236), eqs. 7–12.
    """

    matrix_form = "φ(Q)φ(K)ᵀ, rows sum to 1"
    takes_rows = takes_positions = True
    heads_hook = "hook_z"
    input_hooks = ("hook_q", "hook_k", "hook_v")
    relative = True

    def __init__(self, d_model: int, n_heads: int = 1, *, normalise: bool = True):
        super().__init__()
        if d_model < 1 or n_heads < 1 or d_model % n_heads:
            raise ValueError(f"{d_model=} must be a positive multiple of {n_heads=}")
        self.n_heads, self.normalise = n_heads, normalise
        if not normalise:
            self.matrix_form = "φ(Q)φ(K)ᵀ"
        self.q, self.k, self.v, self.out = (
            nn.Linear(d_model, d_model, bias=False) for _ in range(4)
        )
        self.hook_q = HookPoint()  # φ(q) [b t h n]
        self.hook_k = HookPoint()  # φ(k) [b t h n]
        self.hook_v = HookPoint()  # [b t h p]
        self.hook_z = HookPoint()  # [b t h p]

    def extra_repr(self) -> str:
        """Return the layer's sizes."""
        sums = "" if self.normalise else ", not normalised"
        return f"{self.n_heads} × {self.v.out_features // self.n_heads}{sums}"

    def forward(
        self, x: Float[Tensor, "b t d"], at: Int[Tensor, "b q"] | None = None
    ) -> Float[Tensor, "b q d"]:
        """Return the outputs; with `at` [b q], only those at some positions."""
        if at is None:
            return self.prefill(x)[0]
        q, k, v = self._features(take_positions(x, at), self.q), *self._keys_and_values(x)
        ones = v.new_ones(v.shape[:-1])
        z = ssd_at(v, ones, torch.zeros_like(ones), k, q, at, CHUNK_LEN)
        return self.project(x, self._divide(z))

    def start(self, batch: int, position: int = 0) -> LinearState:
        """Return the state before the first token, which will stand at `position`."""
        weight = self.k.weight
        n = self.k.out_features // self.n_heads
        sums = weight.new_zeros(batch, self.n_heads, n + self.normalise, n, dtype=promote(weight))
        return LinearState(sums, torch.full((batch,), position, device=weight.device))

    def prefill(
        self,
        x: Float[Tensor, "b t d"],
        state: LinearState | None = None,
        keep: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], LinearState]:
        """Return the outputs of further tokens, and the state after them.

        Args:
            x: t ≥ 1 tokens.
            state: what came before them; None: nothing.
            keep: False for padding, which may be anywhere: it adds nothing to the sums.

        Raises:
            ValueError: for a state of another batch or layer, or a mask of another shape.
        """
        check_decoding(x, state, keep, LinearState)
        expected = list(self.start(len(x)).sums.shape)
        if state is not None and list(state.sums.shape) != expected:
            raise ValueError(f"state.sums is {list(state.sums.shape)}, must be {expected}")
        if keep is not None:
            # Padding may hold anything, even NaN.
            x = x.masked_fill(~keep[..., None], 0)
        q, k, v = self._features(x, self.q), *self._keys_and_values(x)
        if keep is not None:
            k = k.masked_fill(~keep[..., None, None], 0)
        ones = v.new_ones(v.shape[:-1])
        before = None if state is None else state.sums
        z, sums = ssd_chunked(v, ones, torch.zeros_like(ones), k, q, None, CHUNK_LEN, before)
        return self.project(x, self._divide(z)), LinearState(sums, next_position(x, state, keep))

    def step(
        self, x: Float[Tensor, "b d"], state: LinearState
    ) -> tuple[Float[Tensor, "b d"], LinearState]:
        """Return the output of one further token, and the state after it."""
        y, state = self.prefill(x[:, None], state)
        return y[:, 0], state

    def matrix(
        self, x: Float[Tensor, "b s d"], rows: slice | None = None
    ) -> Float[Tensor, "b h t s"]:
        """Return the weights of the values, or some of the rows; quadratic, for analysis."""
        first, last, _ = (rows or slice(None)).indices(x.shape[1])
        q, k = self._features(x, self.q), self._features(x, self.k)
        q, k = (rearrange(z, "b t h n -> b h t n") for z in (q[:, first:last], k[:, :last]))
        weights = (q @ k.mT).tril(first)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + EPS)
        return F.pad(weights, (0, x.shape[1] - last))

    def values(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b h s p"]:
        """Return what the matrix mixes."""
        v = self.hook_v(rearrange(self.v(x), "b s (h p) -> b s h p", h=self.n_heads))
        return rearrange(v, "b s h p -> b h s p")

    def project(
        self, x: Float[Tensor, "b _ d"], z: Float[Tensor, "b h t p"]
    ) -> Float[Tensor, "b t d"]:
        """Return the heads' mixed values as an output; nothing else is added from x."""
        z = self.hook_z(rearrange(z, "b h t p -> b t h p"))
        return self.out(rearrange(z, "b t h p -> b t (h p)").to(x.dtype))

    def _features(self, x: Float[Tensor, "b t d"], to: nn.Linear) -> Float[Tensor, "b t h n"]:
        """Return φ of queries or keys, in fp32 at least, since their sums grow."""
        z = rearrange(to(x), "b t (h n) -> b t h n", h=self.n_heads)
        z = F.elu(z.to(promote(z))) + 1
        return self.hook_q(z) if to is self.q else self.hook_k(z)

    def _keys_and_values(
        self, x: Float[Tensor, "b t d"]
    ) -> tuple[Float[Tensor, "b t h n"], Float[Tensor, "b t h p_1"]]:
        """Return φ(k), and the values beside a one for the divisor."""
        k = self._features(x, self.k)
        v = rearrange(self.values(x), "b h t p -> b t h p").to(k.dtype)
        return k, F.pad(v, (0, 1), value=1.0) if self.normalise else v

    def _divide(self, z: Float[Tensor, "b t h p_1"]) -> Float[Tensor, "b h t p"]:
        """Return the sums of values divided by those of the weights."""
        z = rearrange(z, "b t h p -> b h t p")
        return z[..., :-1] / (z[..., -1:] + EPS) if self.normalise else z

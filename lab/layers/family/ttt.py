"""TTT-Linear: the state is a linear model, which learns by gradient descent what tokens show it."""

from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lab.hooks import HookPoint
from lab.layers.mixer import Mixer, take_positions
from lab.layers.state import check_decoding, next_position
from lab.ops.precision import promote

EPS = 1e-6


class TTTState(NamedTuple):
    """The state of a TTT mixer; its size does not depend on how many tokens it has read.

    Attributes:
        weight: W of each head's model, before the current mini-batch.
        bias: b likewise.
        weight_sum: gradients at W of the mini-batch's tokens so far, times their rates.
        bias_sum: those at b.
        filled: tokens of the mini-batch so far.
        position: of the next token.
    """

    weight: Float[Tensor, "b h p p"]
    bias: Float[Tensor, "b h p"]
    weight_sum: Float[Tensor, "b h p p"]
    bias_sum: Float[Tensor, "b h p"]
    filled: Int[Tensor, " b"]
    position: Int[Tensor, " b"]


class TTTLinear(Mixer):
    """y_t = q_t + LN(W_tᵀ q_t + b_t), a norm, then `out`; W_t = W − 1/i Σ_s η_s ∇_W ℓ_s, b_t alike.

    W, b is the head's model before a mini-batch, in which token t is the i-th; the sum is over its
    tokens up to t. They learn to tell v of k: ℓ_s = ½ ‖k_s + LN(Wᵀ k_s + b) − v_s‖². The rate is
    η = σ(·) / p. LN has learned weights, and W and b a learned start.

    What a token reads of an earlier value depends on all tokens before that one: it has no matrix.

    Args:
        d_model: width d.
        n_heads: heads h, each p = d / h wide.
        batch_len: tokens of a mini-batch, which learn from one model.

    Raises:
        ValueError: for widths that do not divide, or a size below 1.

    Source: Sun et al. 2024 (2407.04620), § 2, and their code's η and 1/i. Departs: the factors 1/i
        are not learned, q and k are not rotated, and there are no convolutions and no gate.
    """

    takes_positions = True
    recurrent_hooks = ("hook_rate",)
    relative = True

    def __init__(self, d_model: int, n_heads: int = 1, *, batch_len: int = 16):
        super().__init__()
        if d_model < 1 or n_heads < 1 or d_model % n_heads:
            raise ValueError(f"{d_model=} must be a positive multiple of {n_heads=}")
        if batch_len < 1:
            raise ValueError(f"{batch_len=} must be at least 1")
        self.n_heads, self.batch_len = n_heads, batch_len
        p = d_model // n_heads
        self.q, self.k, self.v, self.out = (nn.Linear(d_model, d_model, bias=False) for _ in "qkvo")
        self.rate = nn.Linear(d_model, n_heads)
        self.weight = nn.Parameter(0.02 * torch.randn(n_heads, p, p))
        self.bias = nn.Parameter(torch.zeros(n_heads, p))
        self.ln_weight = nn.Parameter(torch.ones(n_heads, p))
        self.ln_bias = nn.Parameter(torch.zeros(n_heads, p))
        self.norm = nn.LayerNorm(d_model, eps=EPS)
        self.hook_q, self.hook_k, self.hook_v = HookPoint(), HookPoint(), HookPoint()  # [b t h p]
        self.hook_rate = HookPoint()  # [b t h]
        self.hook_z = HookPoint()  # [b t h p], what the models give for q

    def extra_repr(self) -> str:
        """Return the layer's sizes."""
        return f"{self.n_heads} models {self.weight.shape[-1]} wide, batches of {self.batch_len}"

    def forward(
        self, x: Float[Tensor, "b t d"], at: Int[Tensor, "b q"] | None = None
    ) -> Float[Tensor, "b q d"]:
        """Return the outputs; with `at` [b q], those at some positions."""
        y, _ = self.prefill(x)
        return y if at is None else take_positions(y, at)

    def start(self, batch: int, position: int = 0) -> TTTState:
        """Return the state before the first token, which will stand at `position`."""
        high = promote(self.weight)
        weight, bias = (
            z.to(high).expand(batch, *z.shape).contiguous() for z in (self.weight, self.bias)
        )
        count = torch.zeros(batch, dtype=torch.long, device=weight.device)
        none = torch.zeros_like(weight), torch.zeros_like(bias)
        return TTTState(weight, bias, *none, count, count + position)

    def prefill(
        self,
        x: Float[Tensor, "b t d"],
        state: TTTState | None = None,
        keep: Bool[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, "b t d"], TTTState]:
        """Return the outputs of further tokens, and the state after them.

        Raises:
            ValueError: for a state of another batch or layer, or a mask of another shape.
        """
        check_decoding(x, state, keep, TTTState)
        if state is not None and state.weight.shape[1:] != self.weight.shape:
            raise ValueError(
                f"state.weight is {list(state.weight.shape)}, must be [b, *{[*self.weight.shape]}]"
            )
        high, p = promote(x), self.weight.shape[-1]
        hooks = ((self.hook_q, self.q), (self.hook_k, self.k), (self.hook_v, self.v))
        q, k, v = (hook(rearrange(f(x).to(high), "b t (h p) -> b t h p", p=p)) for hook, f in hooks)
        rate = self.hook_rate(self.rate(x).to(high).sigmoid() / p)
        z, after = self._learn(q, k, v, rate, self.start(len(x)) if state is None else state, keep)
        y = self.complete(q, self.hook_z(z)).flatten(2)
        weight, bias = self.norm.weight.to(y), self.norm.bias.to(y)
        y = nn.functional.layer_norm(y, y.shape[-1:], weight, bias, EPS)
        return self.out(y.to(x.dtype)), after._replace(position=next_position(x, state, keep))

    def step(
        self, x: Float[Tensor, "b d"], state: TTTState
    ) -> tuple[Float[Tensor, "b d"], TTTState]:
        """Return the output of one further token, and the state after it."""
        y, state = self.prefill(x[:, None], state)
        return y[:, 0], state

    def complete(
        self, q: Float[Tensor, "b t h p"], z: Float[Tensor, "b t h p"]
    ) -> Float[Tensor, "b t h p"]:
        """Return what the heads give for q, of which the linear models made z."""
        return q + self.normalise(z)[0] * self.ln_weight.to(z) + self.ln_bias.to(z)

    def normalise(
        self, z: Float[Tensor, "*axes p"]
    ) -> tuple[Float[Tensor, "*axes p"], Float[Tensor, "*axes 1"]]:
        """Return z with mean 0 and variance 1, and the deviation that it was divided by."""
        z = z - z.mean(-1, keepdim=True)
        deviation = (z.square().mean(-1, keepdim=True) + EPS).sqrt()
        return z / deviation, deviation

    def _learn(self, q, k, v, rate, state, keep):
        """Return what the models make of q [b t h p], and the state after these tokens.

        Each row's tokens are placed in mini-batches of slots, which begin with the current one: of
        its slots, those of earlier tokens stay empty, and padding gets none.
        """
        (b, t), size = q.shape[:2], self.batch_len
        slots = -(-(t + size - 1) // size) * size
        kept = torch.ones(b, t, dtype=torch.bool, device=q.device) if keep is None else keep
        at = state.filled[:, None] + kept.cumsum(1) - 1
        at = at.masked_fill(~kept, slots)
        rows = torch.arange(b, device=q.device)[:, None]

        def place(z):
            placed = z.new_zeros(b, slots + 1, *z.shape[2:]).index_put((rows, at), z)
            return placed[:, :slots].unflatten(1, (-1, size)).unbind(1)

        weight, bias, weight_sum, bias_sum = (z.to(q) for z in state[:4])
        share = 1 / torch.arange(1, size + 1, device=q.device).to(q)
        outputs = []
        for q_, k_, v_, rate_, real in zip(*map(place, (q, k, v, rate, kept)), strict=True):
            error = self._differentiate(k_, v_, weight, bias) * (rate_ * real[..., None])[..., None]
            among = torch.einsum("bthp,bshp->bhts", q_, k_).tril()
            learned = torch.einsum("bthp,bhpr->bthr", q_, weight_sum) + bias_sum[:, None]
            learned = learned + torch.einsum("bhts,bshp->bthp", among, error) + error.cumsum(1)
            z = torch.einsum("bthp,bhpr->bthr", q_, weight) + bias[:, None]
            outputs.append(z - share[:, None, None] * learned)
            weight_sum = weight_sum + torch.einsum("bthp,bthr->bhpr", k_, error)
            bias_sum = bias_sum + error.sum(1)
            full = real[:, -1, None, None]
            bias = torch.where(full, bias - share[-1] * bias_sum, bias)
            bias_sum = bias_sum.masked_fill(full, 0)
            full = full[..., None]
            weight = torch.where(full, weight - share[-1] * weight_sum, weight)
            weight_sum = weight_sum.masked_fill(full, 0)
        z = torch.cat(outputs, 1)[rows, at.clamp(max=slots - 1)]
        count = (state.filled + kept.sum(1)) % size
        return z, TTTState(weight, bias, weight_sum, bias_sum, count, state.position)

    def _differentiate(self, k, v, weight, bias):
        """Return the gradients of ℓ at the outputs [b t h p] of the linear models."""
        unit, deviation = self.normalise(torch.einsum("bthp,bhpr->bthr", k, weight) + bias[:, None])
        w = self.ln_weight.to(k)
        to_unit = (k + w * unit + self.ln_bias.to(k) - v) * w
        to_unit = to_unit - to_unit.mean(-1, keepdim=True)
        return (to_unit - unit * (to_unit * unit).mean(-1, keepdim=True)) / deviation

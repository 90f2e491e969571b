"""Differential attention: the difference of two softmaxes, so that what both see cancels."""

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from lab.hooks import HookPoint
from lab.layers.attention import Attention, Position
from lab.layers.mixer import RotaryPairs
from lab.layers.norm import rms_norm
from lab.ops.attention import attend, attention_scores
from lab.ops.rope import Table


class DifferentialAttention(Attention):
    """y_t = Σ_{s≤t} (softmax_s(q¹_t·k¹_s/√n) − λ softmax_s(q²_t·k²_s/√n)) v_s, normed, then `out`.

    Each head's queries and keys are two halves of n channels. λ is one number for all heads:
    exp(l₁·m₁) − exp(l₂·m₂) + λ₀ with learned vectors l, m of n channels. Each head's mixed values
    pass an RMS norm and the factor 1 − λ₀.

    Args:
        d_model: width d.
        n_heads: heads h, each 2n = d / h wide.
        lambda_init: λ₀, in [0, 1).
        position: "rope" rotates each half of queries and keys; "none" gives them no position.

    Raises:
        ValueError: for a λ₀ outside [0, 1), or heads whose halves have no channels to rotate.

    Source: Ye et al. 2024 (2410.05258), eqs. 1–3. Departs: λ₀ is the same in every layer, unless
        given; theirs is 0.8 − 0.6 exp(−0.3 (l − 1)) in layer l.
    """

    matrix_form = "A¹ − λA², rows sum to 1 − λ"
    # The matrix is no softmax of one matrix of scores.
    scores_hook = None

    def __init__(
        self,
        d_model: int,
        n_heads: int = 1,
        *,
        lambda_init: float = 0.8,
        position: Position = "rope",
    ):
        super().__init__(d_model, n_heads, position=position)
        width = d_model // n_heads
        multiple = 4 if position == "rope" else 2
        if width % multiple:
            raise ValueError(
                f"d_model / n_heads = {width} must be a multiple of {multiple} for {position=}"
            )
        if not 0 <= lambda_init < 1:
            raise ValueError(f"{lambda_init=} must be in [0, 1)")
        self.lambda_init = lambda_init
        self.lambdas = nn.Parameter(torch.empty(4, width // 2).normal_(std=0.1))
        self.norm_weight = nn.Parameter(torch.ones(width))
        self.hook_lambda = HookPoint()  # one number

    @property
    def rotary_pairs(self) -> RotaryPairs | None:
        """None: a head compares two rotated vectors, not one."""
        return None

    def project(
        self, x: Float[Tensor, "b _ d"], z: Float[Tensor, "b h t p"]
    ) -> Float[Tensor, "b t d"]:
        """Return the heads' mixed values, normed, as an output."""
        z = self.hook_z(rearrange(z, "b h t p -> b t h p"))
        z = rms_norm(z, self.norm_weight.to(z), 1e-5) * (1 - self.lambda_init)
        return self.out(rearrange(z, "b t h p -> b t (h p)"))

    @property
    def _rotary_width(self) -> int:
        return self.k.out_features // self.n_heads // 2

    def _rotate(self, x: Float[Tensor, "b t h p"], cos: Table, sin: Table) -> Tensor:
        halves = rearrange(x, "b t h (two n) -> b t (h two) n", two=2)
        turned = super()._rotate(halves, cos, sin)
        return rearrange(turned, "b t (h two) n -> b t h (two n)", two=2)

    def _split(self, z: Float[Tensor, "b h t p"]) -> Float[Tensor, "b h2 t n"]:
        """Return the first halves of all heads, then the second ones."""
        return torch.cat(z.chunk(2, dim=-1), dim=1)

    def _difference(self, first: Tensor, second: Tensor) -> Tensor:
        """Return first − λ second."""
        l1, m1, l2, m2 = self.lambdas
        factor = (l1 * m1).sum().exp() - (l2 * m2).sum().exp() + self.lambda_init
        return first - self.hook_lambda(factor).to(second) * second

    def _mix(
        self,
        q: Float[Tensor, "b h t p"],
        k: Float[Tensor, "b h s p"],
        v: Float[Tensor, "b h s p_v"],
        bias: Float[Tensor, "b h s"] | None,
        at: Int[Tensor, "b t"] | None = None,
    ) -> Float[Tensor, "b h t p_v"]:
        if self.hook_attn_scores.active or self.hook_pattern.active:
            return self._pattern(q, k, bias, at) @ v
        q, k = self._split(q), self._split(k)
        bias = None if bias is None else bias.repeat(1, 2, 1)
        v = v.repeat(1, 2, 1, 1)
        return self._difference(*attend(q, k, v, bias, at=at).chunk(2, dim=1))

    def _pattern(
        self,
        q: Float[Tensor, "b h t p"],
        k: Float[Tensor, "b h s p"],
        bias: Float[Tensor, "b h s"] | None,
        at: Int[Tensor, "b t"] | None = None,
    ) -> Float[Tensor, "b h t s"]:
        """Return the difference; the hook of the scores sees both, [b 2h t s]."""
        q, k = self._split(q), self._split(k)
        bias = None if bias is None else bias.repeat(1, 2, 1)
        scores = self.hook_attn_scores(attention_scores(q, k, bias, at=at))
        pattern = self._difference(*scores.softmax(dim=-1).chunk(2, dim=1))
        return self.hook_pattern(pattern.to(q.dtype))

"""The cross domain mixture of experts: one shared MLP, and many single-neuron experts beside it."""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn

from lab.hooks import HookPoint
from lab.layers.mlp import ACTIVATIONS, MLP, Activation
from lab.ops.experts import expert_scores, expert_sum
from lab.ops.product_keys import factor, product_topk

Form = Literal["one", "two"]
Score = Literal["inside", "outside", "raw"]
KeyInit = Literal["normal", "zeros"]

Weighing = Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor]

WEIGHINGS: dict[str, Weighing] = {
    "inside": lambda activation, affinity, scores: activation(affinity * scores),
    "outside": lambda activation, affinity, scores: activation(affinity) * scores.softmax(-1),
    "raw": lambda activation, affinity, scores: activation(affinity) * scores,
}
"""How an expert's affinity x · down_e and its retrieval score become its weight."""


class CDMoE(nn.Module):
    """A shared MLP φ plus the few experts each position retrieves by product keys. [b t d] → same.

        form one: y = Σ_e w_e(x) up_e + φ(x)        form two: y = Σ_e w_e(φ(x)) up_e + φ(x)

    What the experts read, z = x or φ(x), also makes the queries. In each retrieval head, the two
    halves of z W_eQ score the row and column keys; expert e = row · columns + column has score
    s_e = their sum, and the k best are chosen. Their weights w_e:

        outside: σ(z · down_e) · softmax_k(s)    inside: σ((z · down_e) · s_e)
        raw:     σ(z · down_e) · s_e

    Hook points: `hook_subkey_scores` [b t h rows+columns], both halves' scores, rows first;
    `hook_expert_scores` [b t h k], s of the chosen; `hook_expert_indices` [b t h k], int64;
    `hook_expert_weights` [b t h k], w, which multiplies up.

    Initial values: key entries have variance 2/d_retrieval, so that a unit-variance query scores
    every key with variance 1; rows of both tables have a norm near 1 (entries of variance
    1/d_model), so that affinities of a unit-RMS z have variance 1 and the sum starts small beside
    the residual stream.

    Args:
        d_model: width of x, ≥ 1.
        n_experts: rows of the tables; any product of rows and columns (`factor`).
        n_retrieval_heads: independent choices of k experts; nothing to do with a mixer's heads.
        k: experts a head chooses, 1 ≤ k ≤ n_experts. With k = 1 and "outside" the softmax is 1,
            and neither keys nor W_eQ get gradient.
        d_retrieval: width of a head's query, both halves together, even; None is about d_model/2.
        d_ff: hidden width of φ; None is 4 · d_model.
        form: what the experts read, x or φ(x).
        score: where the retrieval score enters.
        key_init: "zeros" is the printed one: all scores tie and every token gets the same experts.
            Until the keys move W_eQ gets no gradient; with "inside" or "raw" nor do the tables.
        activation: σ, of φ and of the experts.
        gated: gate φ.

    The paper gives none of heads, k, d_retrieval, d_ff (T1). The defaults are for d_model near 64:
    32 chosen of 1024 = 32 × 32 experts.

    Raises:
        ValueError: for a size out of bounds, an n_experts that does not factor, an unknown reading.

    Source: eq. cdmoe, § Efficient Retrieval Experts, lst:cdmoe; errata C1 to C5.

    Departs: the printed reading is score="inside", key_init="zeros", under which the experts
    start by adding exactly 0 and only keys get gradient, with "relu" nothing but φ (C3). Tables
    are drawn narrower than the listing's N(0, 1). Form two adds φ(x), as the listing and the last
    step do and eq. cdmoe does not.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_experts: int = 1024,
        n_retrieval_heads: int = 4,
        k: int = 8,
        d_retrieval: int | None = None,
        d_ff: int | None = None,
        form: Form = "two",
        score: Score = "outside",
        key_init: KeyInit = "normal",
        activation: Activation = "silu",
        gated: bool = False,
    ):
        super().__init__()
        d_retrieval = 2 * max(1, d_model // 4) if d_retrieval is None else d_retrieval
        for field, reading, readings in (
            ("form", form, Form),
            ("score", score, Score),
            ("key_init", key_init, KeyInit),
        ):
            if reading not in get_args(readings):
                known = ", ".join(get_args(readings))
                raise ValueError(f"{field}={reading!r}: must be one of {known}")
        if n_retrieval_heads < 1:
            raise ValueError(f"n_retrieval_heads={n_retrieval_heads}: must be ≥ 1")
        if d_retrieval < 2 or d_retrieval % 2:
            raise ValueError(
                f"d_retrieval={d_retrieval}: must be ≥ 2 and even, a half each for rows and columns"
            )
        self.shape = factor(n_experts)
        if not 1 <= k <= n_experts:
            raise ValueError(f"k={k}: must be in 1 … n_experts={n_experts}")

        self.cross_domain = MLP(d_model, d_ff=d_ff, activation=activation, gated=gated)
        self.n_retrieval_heads, self.k = n_retrieval_heads, k
        self.form, self.score = form, score
        self.activation = ACTIVATIONS[activation]
        self.query = nn.Linear(d_model, n_retrieval_heads * d_retrieval, bias=False)
        width = d_retrieval // 2
        key_std = width**-0.5 if key_init == "normal" else 0.0
        self.row_keys, self.column_keys = (
            nn.Parameter(torch.randn(n_retrieval_heads, n_keys, width) * key_std)
            for n_keys in self.shape
        )
        self.down, self.up = (
            nn.Parameter(torch.randn(n_experts, d_model) * d_model**-0.5) for _ in range(2)
        )
        self.hook_subkey_scores = HookPoint()
        self.hook_expert_scores = HookPoint()
        self.hook_expert_indices = HookPoint()
        self.hook_expert_weights = HookPoint()

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return the chosen experts' sum plus φ(x)."""
        shared = self.cross_domain(x)
        z = x if self.form == "one" else shared
        row_scores, column_scores = self.hook_subkey_scores(self.subkey_scores(z)).split(
            self.shape, dim=-1
        )
        scores, indices = product_topk(row_scores, column_scores, self.k)
        scores, indices = self.hook_expert_scores(scores), self.hook_expert_indices(indices)
        affinity = expert_scores(z, self.down, indices)
        weights = WEIGHINGS[self.score](self.activation, affinity, scores)
        return expert_sum(self.hook_expert_weights(weights), self.up, indices) + shared

    def subkey_scores(self, z: Float[Tensor, "b t d"]) -> Float[Tensor, "b t h keys"]:
        """Return what each head's query scores the row keys, then the column keys."""
        query = rearrange(
            self.query(z), "b t (half h r) -> half b t h r", half=2, h=self.n_retrieval_heads
        )
        scores = [
            einsum(part, keys, "b t h r, h keys r -> b t h keys")
            for part, keys in zip(query, (self.row_keys, self.column_keys), strict=True)
        ]
        return torch.cat(scores, dim=-1)

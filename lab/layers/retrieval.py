"""Single-neuron experts behind product keys: what CDMoE and PEER have in common."""

from abc import ABC, abstractmethod
from typing import Literal, get_args

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn

from lab.hooks import HookPoint
from lab.ops.experts import Backend, expert_scores, expert_sum, resolve_experts_backend
from lab.ops.product_keys import factor, product_topk
from tasks.bounds import check_choice

KeyInit = Literal["normal", "zeros"]
QueryNorm = Literal["none", "batch"]


class RetrievedExperts(nn.Module, ABC):
    """Each position adds up the few experts it retrieves. z [b t d] → Σ_e w_e(z) up_e [b t d].

    In each retrieval head, the two halves of z W_eQ score the row and column keys; expert
    e = row · columns + column has score s_e = their sum, and the k best are chosen. A subclass
    computes each expert's weight from its affinity z · down_e and its score (`weigh`).

    Hook points: `hook_subkey_scores` [b t h rows+columns], both halves' scores, rows first;
    `hook_expert_scores` [b t h k], s of the chosen; `hook_expert_indices` [b t h k], int64;
    `hook_expert_weights` [b t h k], w, which multiplies up.

    Initial values: key entries have variance 2/d_retrieval, so that a unit-variance query scores
    every key with variance 1; rows of both tables have a norm near 1 (entries of variance
    1/d_model), so that affinities of a unit-RMS z have variance 1 and the sum starts small beside
    the residual stream.

    Args:
        d_model: width of z, ≥ 1.
        n_experts: rows of the tables; any number that `grid` takes.
        n_retrieval_heads: independent choices of k experts.
        k: experts a head chooses, 1 ≤ k ≤ n_experts.
        d_retrieval: width of a head's query, both halves together, even; None is about d_model/2.
        key_init: with "zeros" all scores tie: every token gets the same experts, and W_eQ gets no
            gradient until the keys have moved.
        query_norm: "batch" normalises each channel of the queries over all positions in training,
            including padding, since a state transform does not get a mixer's `keep`.
        backend: of `lab.ops.experts`, the same values from each.

    Raises:
        ValueError: for a size out of bounds, an n_experts that does not factor, an unknown name.

    Source: § Efficient Retrieval Experts.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_experts: int,
        n_retrieval_heads: int,
        k: int,
        d_retrieval: int | None,
        key_init: KeyInit,
        query_norm: QueryNorm,
        backend: Backend,
    ):
        super().__init__()
        d_retrieval = 2 * max(1, d_model // 4) if d_retrieval is None else d_retrieval
        check_choice("key_init", key_init, get_args(KeyInit))
        check_choice("query_norm", query_norm, get_args(QueryNorm))
        for field, size in (("d_model", d_model), ("n_retrieval_heads", n_retrieval_heads)):
            if size < 1:
                raise ValueError(f"{field}={size}: must be ≥ 1")
        if d_retrieval < 2 or d_retrieval % 2:
            raise ValueError(
                f"d_retrieval={d_retrieval}: must be ≥ 2 and even, a half each for rows and columns"
            )
        self.shape = rows, columns = self.grid(n_experts)
        if not 1 <= k <= rows * columns:
            raise ValueError(f"k={k}: must be in 1 … n_experts={rows * columns}")
        self.n_retrieval_heads, self.k = n_retrieval_heads, k
        self.backend = resolve_experts_backend(
            backend, n_experts=n_experts, n_chosen=n_retrieval_heads * k, width=d_model
        )

        d_queries = n_retrieval_heads * d_retrieval
        self.query = nn.Linear(d_model, d_queries, bias=False)
        self.query_norm = nn.BatchNorm1d(d_queries) if query_norm == "batch" else None
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

    def extra_repr(self) -> str:
        """Return the layer's sizes."""
        rows, columns = self.shape
        chosen = f"{self.n_retrieval_heads} × {self.k} of {rows} × {columns} experts"
        return f"{chosen}, {self.backend}"

    @property
    def idle_parameters(self) -> int:
        """How many of the layer's parameters a token leaves alone: rows of experts not chosen."""
        n_experts, d_model = self.down.shape
        chosen = min(self.n_retrieval_heads * self.k, n_experts)
        return 2 * d_model * (n_experts - chosen)

    def grid(self, n_experts: int) -> tuple[int, int]:
        """Return how many row and column keys a head has."""
        return factor(n_experts)

    @abstractmethod
    def weigh(
        self, affinity: Float[Tensor, "b t h k"], scores: Float[Tensor, "b t h k"]
    ) -> Float[Tensor, "b t h k"]:
        """Return what multiplies up_e, from z · down_e and s_e of the chosen experts."""

    def retrieve(self, z: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return the chosen experts' sum."""
        row_scores, column_scores = self.subkey_scores(z)
        if self.hook_subkey_scores.active:
            # Only hooks need the two as one tensor, the largest here.
            both = self.hook_subkey_scores(torch.cat([row_scores, column_scores], dim=-1))
            row_scores, column_scores = both.split(self.shape, dim=-1)
        scores, indices = product_topk(row_scores, column_scores, self.k)
        scores, indices = self.hook_expert_scores(scores), self.hook_expert_indices(indices)
        affinity = expert_scores(z, self.down, indices, self.backend)
        weights = self.hook_expert_weights(self.weigh(affinity, scores))
        return expert_sum(weights, self.up, indices, self.backend)

    def subkey_scores(
        self, z: Float[Tensor, "b t d"]
    ) -> tuple[Float[Tensor, "b t h rows"], Float[Tensor, "b t h columns"]]:
        """Return what each head's query scores the row keys, and the column keys."""
        query = self.query(z)
        if self.query_norm is not None:
            query = self.query_norm(query.flatten(0, 1)).view_as(query)
        row_query, column_query = rearrange(
            query, "b t (half h r) -> half b t h r", half=2, h=self.n_retrieval_heads
        )
        return (
            einsum(row_query, self.row_keys, "b t h r, h rows r -> b t h rows"),
            einsum(column_query, self.column_keys, "b t h r, h columns r -> b t h columns"),
        )

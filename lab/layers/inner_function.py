"""Inner function attention: attention whose values are x times rows that x itself looks up."""

from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lab.hooks import HookPoint
from lab.layers.attention import Attention, Mask, Position
from lab.ops.attention import Backend
from lab.ops.rope import Layout
from tasks.bounds import check_choice

Retrieval = Literal["literal", "softmax", "sigmoid", "straight-through"]
ValueMap = Literal["diagonal", "linear"]
KeyInit = Literal["normal", "zeros"]


class InnerFunctionAttention(Attention):
    """Causal attention with values V = Σ_{i in top k of g} w_i·(f(x) ∘ θ_i), g = x W_vQ θ_vKᵀ.

    The weights w by `retrieval`:

        literal           1. Only the indices of the top k are used, so W_vQ and θ_vK get no
                          gradient; with zero keys all scores tie and every token takes the same
                          rows (erratum I1)
        softmax           softmax over all n_v scores, at the chosen: a gradient even for k = 1.
                          With k = n_v a sum over all rows, as the equation's, but by the
                          softmax of its scores, not by the scores (erratum I3)
        sigmoid           σ(g_i)
        straight-through  1 forward, the gradient of softmax backward

    and f by `value_map`: x itself ("diagonal"), or x W ("linear"). Of equal scores the row of
    lower index is chosen. Arguments not named here are `Attention`'s.

    Args:
        n_values: rows n_v of θ [n_v d_value]. N(0, 1) at the start, `nn.Embedding`'s as in the
            listing: rows that differ, so that the choice matters from the first step.
        d_retrieval: width of the scores' inner product; None: d_model / 2, the paper's d_innerV
            read as a retrieval width (erratum I4).
        k: rows a token takes, at most n_values.
        retrieval: how the chosen rows are weighted.
        value_map: what the rows multiply.
        d_value: width of a value, the other reading of d_innerV (erratum I4); None: d_model.
            Any multiple of n_heads for "linear"; "diagonal" has no map that could change it, nor
            share it among heads, so there n_kv_heads is n_heads.
        key_init: "normal", N(0, 1/d_retrieval), for scores of order one; "zeros" as printed.

    Raises:
        ValueError: also for counts out of range, d_value or fewer n_kv_heads beside "diagonal".

    Source: eq. inner_function_V, lst:innerfuncattn. Departs: n_v rows, where the listing has
        n_heads (erratum I2); hard top k by default, where the equation sums over all, each row
        times its raw score (I3).
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int = 1,
        *,
        n_values: int = 2,
        d_retrieval: int | None = None,
        k: int = 1,
        retrieval: Retrieval = "softmax",
        value_map: ValueMap = "diagonal",
        d_value: int | None = None,
        key_init: KeyInit = "normal",
        position: Position = "rope",
        rope_base: float = 10000.0,
        rope_layout: Layout = "half",
        mask: Mask = "none",
        window: int | None = None,
        max_seq_len: int = 8192,
        n_kv_heads: int | None = None,
        backend: Backend = "auto",
    ):
        check_choice("retrieval", retrieval, get_args(Retrieval))
        check_choice("value_map", value_map, get_args(ValueMap))
        check_choice("key_init", key_init, get_args(KeyInit))
        if value_map == "diagonal" and d_value not in (None, d_model):
            raise ValueError(f"{d_value=} must be {d_model=} for value_map='diagonal'")
        if value_map == "diagonal" and n_kv_heads not in (None, n_heads):
            raise ValueError(f"{n_kv_heads=} must be {n_heads=} for value_map='diagonal'")
        super().__init__(
            d_model,
            n_heads,
            position=position,
            rope_base=rope_base,
            rope_layout=rope_layout,
            mask=mask,
            window=window,
            max_seq_len=max_seq_len,
            d_value=d_value,
            n_kv_heads=n_kv_heads,
            backend=backend,
        )
        d_retrieval = d_model // 2 if d_retrieval is None else d_retrieval
        if d_retrieval < 1:
            raise ValueError(f"{d_retrieval=} must be at least 1")
        if not 1 <= k <= n_values:
            raise ValueError(f"{k=} must be between 1 and {n_values=}")
        self.n_chosen = k
        self.retrieval = retrieval
        if value_map == "diagonal":
            self.v = nn.Identity()
        self.value_query = nn.Linear(d_model, d_retrieval, bias=False)
        self.value_keys = nn.Parameter(torch.zeros(n_values, d_retrieval))
        if key_init == "normal":
            nn.init.normal_(self.value_keys, std=d_retrieval**-0.5)
        d_rows = self.out.in_features // self.n_heads * self.n_kv_heads
        self.value_rows = nn.Parameter(torch.randn(n_values, d_rows))
        self.hook_value_scores = HookPoint()  # [b t n_v]
        self.hook_value_indices = HookPoint()  # [b t k]

    def extra_repr(self) -> str:
        """Return the layer's sizes and readings."""
        rows = f"{self.n_chosen} of {len(self.value_rows)} values by {self.retrieval}"
        return f"{rows}, {super().extra_repr()}"

    @property
    def idle_parameters(self) -> int:
        """How many of the layer's parameters a token leaves alone: rows of values not chosen."""
        n_values, width = self.value_rows.shape
        return (n_values - self.n_chosen) * width

    def _value_vectors(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b s d_value"]:
        """Return f(x) times the weighted sum of the rows that each token chose."""
        scores = self.hook_value_scores(self.value_query(x) @ self.value_keys.T)
        ranked = scores.argsort(dim=-1, descending=True, stable=True)
        chosen = self.hook_value_indices(ranked[..., : self.n_chosen])
        # Rows are few, so mixing all of them costs less than gathering k of them a token.
        weights = self._weights(scores, chosen)
        mixture = weights.new_zeros(scores.shape).scatter(-1, chosen, weights)
        return self.v(x) * (mixture @ self.value_rows)

    def _weights(
        self, scores: Float[Tensor, "b s n_v"], chosen: Int[Tensor, "b s k"]
    ) -> Float[Tensor, "b s k"]:
        """Return the weights of the chosen rows."""
        if self.retrieval == "sigmoid":
            return scores.sigmoid().gather(-1, chosen)
        if self.retrieval == "literal":
            return torch.ones_like(chosen, dtype=scores.dtype)
        soft = scores.softmax(dim=-1).gather(-1, chosen)
        return soft if self.retrieval == "softmax" else 1 + (soft - soft.detach())

"""PEER, parameter efficient expert retrieval: single-neuron experts and nothing else."""

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lab.layers.mlp import ACTIVATIONS, Activation
from lab.layers.retrieval import QueryNorm, RetrievedExperts
from lab.ops.experts import Backend
from tasks.bounds import check_choice

ScoreActivation = Literal["softmax", "relu", "sigmoid"]

SCORE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": partial(torch.softmax, dim=-1),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
}
"""How the scores of a head's k experts become their gates: competing, or each for itself."""


class PEER(RetrievedExperts):
    """The few of many single-neuron experts that each position retrieves. [b t d] → same.

        y = Σ_heads Σ_k g(s_e) σ(x · down_e) up_e

    `RetrievedExperts` says how the experts are chosen by x's product keys, what the hook points
    are, and the initial values.

    Args:
        d_model: width of x, ≥ 1.
        n_experts: rows of the tables; any product of rows and columns (`factor`).
        n_retrieval_heads: independent choices of k experts.
        k: experts a head chooses, 1 ≤ k ≤ n_experts. With k = 1 the softmax is 1, and neither
            keys nor W_eQ get gradient.
        d_retrieval: width of a head's query, both halves together, even; None is about d_model/2.
        activation: σ.
        score_activation: g. "softmax" lets a head's experts compete; "relu" and "sigmoid" gate
            each by its own score.
        query_norm: "batch" is the source's BatchNorm of the queries, [h · d_retrieval] channels
            with a gain and a bias. While it trains, what it does to a token depends on all
            tokens of the batch, later ones and padding too; in evaluation on none.
        backend: of `lab.ops.experts`: "gather", "dense" or "auto".

    Raises:
        ValueError: for a size out of bounds, an n_experts that does not factor, an unknown name.

    Source: He 2024, Mixture of a Million Experts (arXiv 2407.04153), Algorithm 1 and eqs. 1–2.
    "relu" is PEER-pytorch's `non_competing_scores`, after Csordás et al. 2023.

    Departs: tables and keys as in `RetrievedExperts`; no BatchNorm unless asked for, as in
    PEER-pytorch. That implementation's default, non-competing, chooses one expert a head whatever
    `num_experts_per_head` says: k = 1 and "relu" here.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_experts: int = 1024,
        n_retrieval_heads: int = 4,
        k: int = 8,
        d_retrieval: int | None = None,
        activation: Activation = "gelu",
        score_activation: ScoreActivation = "softmax",
        query_norm: QueryNorm = "none",
        backend: Backend = "auto",
    ):
        check_choice("activation", activation, tuple(ACTIVATIONS))
        check_choice("score_activation", score_activation, get_args(ScoreActivation))
        super().__init__(
            d_model,
            n_experts=n_experts,
            n_retrieval_heads=n_retrieval_heads,
            k=k,
            d_retrieval=d_retrieval,
            key_init="normal",
            query_norm=query_norm,
            backend=backend,
        )
        self.activation = ACTIVATIONS[activation]
        self.score_activation = SCORE_ACTIVATIONS[score_activation]

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return the chosen experts' sum."""
        return self.retrieve(x)

    def weigh(
        self, affinity: Float[Tensor, "b t h k"], scores: Float[Tensor, "b t h k"]
    ) -> Float[Tensor, "b t h k"]:
        """Return g(s_e) σ(x · down_e)."""
        return self.activation(affinity) * self.score_activation(scores)

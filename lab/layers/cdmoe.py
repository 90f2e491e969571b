"""The cross domain mixture of experts: one shared MLP, and many single-neuron experts beside it."""

from collections.abc import Callable
from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor

from lab.layers.mlp import ACTIVATIONS, MLP, Activation
from lab.layers.retrieval import KeyInit, RetrievedExperts
from lab.ops.experts import Backend
from tasks.bounds import check_choice

Form = Literal["one", "two"]
Score = Literal["inside", "outside", "raw"]

Weighing = Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor]

WEIGHINGS: dict[str, Weighing] = {
    "inside": lambda activation, affinity, scores: activation(affinity * scores),
    "outside": lambda activation, affinity, scores: activation(affinity) * scores.softmax(-1),
    "raw": lambda activation, affinity, scores: activation(affinity) * scores,
}
"""How an expert's affinity z · down_e and its retrieval score become its weight."""


class CDMoE(RetrievedExperts):
    """A shared MLP φ plus the few experts each position retrieves by product keys. [b t d] → same.

        form one: y = Σ_e w_e(x) up_e + φ(x)        form two: y = Σ_e w_e(φ(x)) up_e + φ(x)

    What the experts read, z = x or φ(x), also makes the queries; `RetrievedExperts` says how the
    experts are chosen, what the hook points are, and the initial values. Weights of the chosen:

        outside: σ(z · down_e) · softmax_k(s)    inside: σ((z · down_e) · s_e)
        raw:     σ(z · down_e) · s_e

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
        backend: of `lab.ops.experts`: "gather", "dense" or "auto".

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
        backend: Backend = "auto",
    ):
        check_choice("form", form, get_args(Form))
        check_choice("score", score, get_args(Score))
        super().__init__(
            d_model,
            n_experts=n_experts,
            n_retrieval_heads=n_retrieval_heads,
            k=k,
            d_retrieval=d_retrieval,
            key_init=key_init,
            query_norm="none",
            backend=backend,
        )
        self.cross_domain = MLP(d_model, d_ff=d_ff, activation=activation, gated=gated)
        self.form, self.score = form, score
        self.activation = ACTIVATIONS[activation]

    def extra_repr(self) -> str:
        """Return the layer's sizes and readings."""
        return f"{super().extra_repr()}, MLP {self.cross_domain.extra_repr()}, form {self.form}"

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return the chosen experts' sum plus φ(x)."""
        shared = self.cross_domain(x)
        return self.retrieve(x if self.form == "one" else shared) + shared

    def weigh(
        self, affinity: Float[Tensor, "b t h k"], scores: Float[Tensor, "b t h k"]
    ) -> Float[Tensor, "b t h k"]:
        """Return the weights in the reading `score`."""
        return WEIGHINGS[self.score](self.activation, affinity, scores)

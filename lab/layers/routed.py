"""Mixtures of experts with a router: each token goes to the k MLPs that score it best.

`SharedExpertMoE` also gives every token the same shared MLPs (MoE-SEI), after DeepSeekMoE.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from lab.hooks import HookPoint, hook_points, hooks
from lab.layers.mlp import ACTIVATIONS, MLP, Activation
from lab.ops.grouped import Backend, ExpertWeights, apply_experts, resolve_grouped_backend
from tasks.bounds import check_choice

BALANCE_HOOK = "hook_balance_loss"


class RoutedMoE(nn.Module):
    """The weighted sum of the k of n_experts MLPs that a linear router chooses. [b t d] → same.

        p = softmax_e(x W_R),    y = Σ_{e in the k best} p_e φ_e(x)

    Token choice, dropless: an expert serves every token that chose it. The loss that keeps the
    experts evenly used, which training adds to its own (`collect_balance_losses`), is

        balance_weight · n_experts · Σ_e f_e P_e

    with f_e the share of all choices that fell on e and P_e the mean of p_e, over the tokens of a
    forward pass: balance_weight where all are used alike, at most n_experts times that. Padding
    counts as tokens here, since a state transform does not get a mixer's `keep`. The output of a
    token depends on no other token.

    Hook points: `hook_router_scores` [b t e], p; `hook_expert_indices` [b t k], int64, best first;
    `hook_expert_weights` [b t k], which multiply the experts; `hook_balance_loss`, a scalar, and
    `hook_expert_share` [e], f, both computed when a hook is at the former.

    Args:
        d_model: width of x, ≥ 1.
        n_experts: MLPs to choose from, ≥ 1.
        k: MLPs a token gets, 1 ≤ k ≤ n_experts.
        d_ff: hidden width of each; None is 2 · d_model, with k = 2 as many as a plain MLP's.
        activation: σ of the experts.
        gated: gate the experts.
        normalise: divide the chosen p by their sum, as Mixtral and GShard do; Jamba, Switch and
            DeepSeekMoE do not. With k = 1 the quotient is 1, and the router learns from the
            balance loss alone.
        balance_weight: ≥ 0.
        backend: of `lab.ops.grouped`: "loop", "grouped_mm" or "auto".

    Raises:
        ValueError: for a size or weight out of bounds, or an unknown name.

    Source: Shazeer et al. 2017; the loss is Switch Transformer's eqs. 4–6 (Fedus et al. 2021),
    with f over all k choices, so that its least value does not grow with k.

    Departs: no noise on the router, no capacity.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_experts: int = 4,
        k: int = 2,
        d_ff: int | None = None,
        activation: Activation = "silu",
        gated: bool = False,
        normalise: bool = False,
        balance_weight: float = 0.01,
        backend: Backend = "auto",
    ):
        super().__init__()
        d_ff = 2 * d_model if d_ff is None else d_ff
        for field, size in (("d_model", d_model), ("n_experts", n_experts), ("d_ff", d_ff)):
            if size < 1:
                raise ValueError(f"{field}={size}: must be ≥ 1")
        if not 1 <= k <= n_experts:
            raise ValueError(f"k={k}: must be in 1 … n_experts={n_experts}")
        if not 0 <= balance_weight < float("inf"):
            raise ValueError(f"balance_weight={balance_weight}: must be ≥ 0 and finite")
        check_choice("activation", activation, tuple(ACTIVATIONS))
        check_choice("backend", backend, get_args(Backend))
        if backend == "grouped_mm":
            resolve_grouped_backend(
                backend, dtype=torch.get_default_dtype(), widths=(d_model, d_ff)
            )

        self.n_experts, self.k = n_experts, k
        self.normalise, self.balance_weight, self.backend = normalise, balance_weight, backend
        self.activation = ACTIVATIONS[activation]
        self.router = nn.Linear(d_model, n_experts, bias=False)
        self.gate = _draw_weights(n_experts, d_model, d_ff) if gated else None
        self.up = _draw_weights(n_experts, d_model, d_ff)
        self.down = _draw_weights(n_experts, d_ff, d_model)
        self.hook_router_scores = HookPoint()
        self.hook_expert_indices = HookPoint()
        self.hook_expert_weights = HookPoint()
        self.hook_expert_share = HookPoint()
        self.hook_balance_loss = HookPoint()

    def extra_repr(self) -> str:
        """Return the layer's sizes."""
        gated = "gated, " if self.gate is not None else ""
        # What "auto" is depends on the inputs.
        backend = "" if self.backend == "auto" else f", {self.backend}"
        return f"{self.k} of {self.n_experts} experts, {gated}d_ff {self.up.shape[-1]}{backend}"

    @property
    def idle_parameters(self) -> int:
        """How many of the layer's parameters a token leaves alone: experts not chosen."""
        tables = [table for table in (self.up, self.down, self.gate) if table is not None]
        return sum(table[0].numel() for table in tables) * (self.n_experts - self.k)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return the weighted sum of the chosen experts' outputs."""
        scores = self.hook_router_scores(self.router_scores(x))
        indices = self.hook_expert_indices(scores.topk(self.k, dim=-1).indices)
        weights = scores.gather(-1, indices)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = self.hook_expert_weights(weights.to(x.dtype))
        if self.hook_balance_loss.active:
            share = self.hook_expert_share(measure_share(indices, scores))
            self.hook_balance_loss(self.balance_weight * imbalance(scores, share))
        y = apply_experts(
            x.flatten(0, 1),
            weights.flatten(0, 1),
            indices.flatten(0, 1),
            ExpertWeights(self.up, self.down, self.gate),
            self.activation,
            self.backend,
        )
        return y.view_as(x)

    def router_scores(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t e"]:
        """Return p, in fp32 at least, to tell nearly equal experts apart."""
        logits = self.router(x)
        return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


class SharedExpertMoE(RoutedMoE):
    """Experts that every token gets, plus the k of n_experts it is routed to. [b t d] → same.

        y = Σ_{s = 1 … n_shared} φ_s(x) + Σ_{e in the k best} p_e φ_e(x)

    What all tokens need the shared experts hold, so that the routed ones need not each learn it.
    The routed half, its hook points and its balance loss are `RoutedMoE`'s.

    Args:
        d_model: width of x, ≥ 1.
        n_experts: routed MLPs to choose from, ≥ 1; the shared ones are not counted.
        n_shared: shared MLPs, ≥ 1; computed as one of n_shared · d_ff hidden units, which is the
            same function.
        k: routed MLPs a token gets, 1 ≤ k ≤ n_experts.
        d_ff: hidden width of each expert; None is 2 · d_model, with the defaults as many hidden
            units a token as a plain MLP's. DeepSeekMoE's fine grain is m times as many experts of
            an m-th the width, and m times as many chosen.
        activation: σ of all experts.
        gated: gate all experts.
        normalise: divide the chosen p by their sum; DeepSeekMoE does not.
        balance_weight: ≥ 0; DeepSeekMoE's α₁.
        backend: of `lab.ops.grouped`, for the routed ones.

    Raises:
        ValueError: for a size or weight out of bounds, or an unknown name.

    Source: Dai et al. 2024, DeepSeekMoE (arXiv 2401.06066), eqs. 9–14; the paper's MoE-SEI, whose
    baselines have n_experts = 4 (tab:downstream_evaluation:model); n_shared and k it does not give.

    Departs: the residual of eq. 9 is the block's; no loss of balance between devices.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_experts: int = 4,
        n_shared: int = 1,
        k: int = 1,
        d_ff: int | None = None,
        activation: Activation = "silu",
        gated: bool = False,
        normalise: bool = False,
        balance_weight: float = 0.01,
        backend: Backend = "auto",
    ):
        if n_shared < 1:
            raise ValueError(f"n_shared={n_shared}: must be ≥ 1; without shared experts: RoutedMoE")
        d_ff = 2 * d_model if d_ff is None else d_ff
        super().__init__(
            d_model,
            n_experts=n_experts,
            k=k,
            d_ff=d_ff,
            activation=activation,
            gated=gated,
            normalise=normalise,
            balance_weight=balance_weight,
            backend=backend,
        )
        self.shared = MLP(d_model, d_ff=n_shared * d_ff, activation=activation, gated=gated)

    def extra_repr(self) -> str:
        """Return the layer's sizes."""
        return f"{self.shared.up.out_features // self.up.shape[-1]} shared, {super().extra_repr()}"

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        """Return what the shared and the chosen experts make of x, added up."""
        return self.shared(x) + super().forward(x)


def measure_share(
    indices: Int[Tensor, "b t k"], scores: Float[Tensor, "b t e"]
) -> Float[Tensor, " e"]:
    """Return f, the share of all choices that fell on each expert, in the dtype of the scores."""
    return F.one_hot(indices, scores.shape[-1]).to(scores.dtype).mean((0, 1, 2))


def imbalance(scores: Float[Tensor, "b t e"], share: Float[Tensor, " e"]) -> Float[Tensor, ""]:
    """Return n_experts · Σ_e f_e P_e: 1 where all experts are used alike, at most n_experts.

    Args:
        scores: p, rows that sum to one; gradient flows through them alone.
        share: f, of all choices, that fell on each expert.
    """
    return len(share) * (share * scores.mean((0, 1))).sum()


@contextmanager
def collect_balance_losses(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the weighted balance losses of all forward passes in a `with` block.

    >>> layer = RoutedMoE(16, n_experts=4, k=1)
    >>> with collect_balance_losses(layer) as losses:
    ...     loss = layer(torch.randn(2, 8, 16)).square().mean()
    >>> len(losses)
    1
    >>> sum(losses, start=loss).backward()

    One scalar per layer and pass, in the order of the layers; none without routed layers. It works
    in compiled code too (`lab.hooks`).
    """
    losses: list[Tensor] = []
    names = [name for name in hook_points(model) if name.split(".")[-1] == BALANCE_HOOK]
    with hooks(model, [(names, lambda loss, _: losses.append(loss))]):
        yield losses


def _draw_weights(n_experts: int, inputs: int, outputs: int) -> nn.Parameter:
    """Return weights [e inputs outputs], each expert's drawn like those of a linear layer."""
    return nn.Parameter(torch.empty(n_experts, inputs, outputs).uniform_(-1, 1) * inputs**-0.5)

"""The mixture of experts with shared expert isolation (MoE-SEI), after DeepSeekMoE."""

from jaxtyping import Float
from torch import Tensor

from lab.layers.mlp import MLP, Activation
from lab.layers.routed import RoutedMoE
from lab.ops.grouped import Backend


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

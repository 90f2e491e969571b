"""The cross domain mixture of experts on a square of keys, whatever the number of experts."""

from math import isqrt

from lab.layers.cdmoe import CDMoE


class FloorSquareCDMoE(CDMoE):
    """CDMoE addressed by ⌊√n_experts⌋² product keys: the experts above that are never chosen.

    Of the paper's 3,072 and 8,192 experts, 47 and 92 have parameters that nothing reaches
    (erratum C4). Arguments are `CDMoE`'s; k is at most ⌊√n_experts⌋².

    A state transform, not a mixer of tokens: it stands behind U only so that it can be trained
    without a change.

    Source: lst:cdmoe. Departs: num_keys rounded down, so that it runs (erratum C2); by default
        normal keys and the score outside σ (erratum C3).
    """

    def grid(self, n_experts: int) -> tuple[int, int]:
        """Return the same number of row and column keys."""
        return isqrt(n_experts), isqrt(n_experts)

"""Squared error of a linear head."""

from jaxtyping import Float
from torch import Tensor

from lab.ops.precision import promote


def linear_squared_error(
    hidden: Float[Tensor, "q d"], weight: Float[Tensor, "o d"], targets: Float[Tensor, "q o"]
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return the mean squared error, differentiable, and the sum of squares that is explained.

        answers = hidden Wᵀ,   explained = Σ y² − Σ (y − answer)²

    The product runs in the inputs' dtype, the error in fp32 at least.

    Args:
        hidden: hidden states.
        weight: of the head.
        targets: the right answers y; NaN stands for a position that counts for nothing.

    Raises:
        ValueError: when no position is scored.
    """
    if hidden.shape[0] == 0:
        raise ValueError("hidden has 0 rows: at least one position must be scored")
    scored = ~targets.isnan()
    right = targets.where(scored, 0)
    error = ((hidden @ weight.T).to(promote(hidden)) - right).square().where(scored, 0)
    explained = right.square().sum() - error.detach().sum()
    return error.sum() / scored.sum(), explained

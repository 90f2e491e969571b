"""When a training has diverged: what ends it before its weights are lost."""

import math

from lab.training.state import TrainingState

DIVERGED_AT = 4.0
"""A loss this many times the larger of the first loss and ln(vocabulary) has diverged."""


class DivergedError(Exception):
    """Training diverged: the loss or the gradient is not finite, or the loss exploded."""


def raise_if_diverged(
    state: TrainingState, step: int, loss: float, grad_norm: float, vocab_size: int
) -> None:
    """Check a step's loss and the norm of its gradients, and note the first loss.

    Raises:
        DivergedError: if either is not finite, or the loss has exploded.
    """
    if not math.isfinite(loss):
        raise DivergedError(f"loss={loss} at step {step}")
    if not math.isfinite(grad_norm):
        raise DivergedError(f"gradient norm={grad_norm} at step {step}")
    if state.first_loss is None:
        state.first_loss = loss
    bound = DIVERGED_AT * max(state.first_loss, math.log(vocab_size))
    if loss > bound:
        raise DivergedError(f"loss={loss:.3g} at step {step}, above {bound:.3g}")

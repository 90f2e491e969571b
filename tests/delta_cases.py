"""Arguments of `lab.ops.delta`, in every combination of its options."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DECAYS = ("none", "head", "channel")
CORRECTIONS = ("none", "own key", "apart", "before decay")


def draw_problem(
    t: int,
    decay: str = "none",
    correction: str = "none",
    writes: int | None = None,
    own: bool = False,
    groups: int = 2,
    heads: int = 2,
    seed: int = 0,
    strength: float = 1.0,
    forgets: float = 0.1,
    b: int = 2,
    n: int = 5,
    p: int = 3,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    """Return keyword arguments: keys of length 1, β in (0, 2), decays of which some forget all.

    Args:
        strength: the typical size of a log-decay.
        forgets: the share of log-decays that are −10⁴.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    times = (b, t) if writes is None else (b, t, writes)
    k = F.normalize(normal(*times, groups, n), dim=-1)
    beta = 2 * torch.rand(*times, groups, 1, generator=generator, dtype=torch.float64).to(dtype)
    problem: dict[str, Any] = {
        "q": normal(b, t, groups, n),
        "k": beta * k if correction == "own key" else k,
        "v": normal(*times, heads, p),
    }
    if decay != "none":
        log_decay = -strength * normal(b, t, heads, *([n] if decay == "channel" else [])).exp()
        all_of_it = torch.rand(log_decay.shape, generator=generator) < forgets
        problem["log_decay"] = log_decay.masked_fill(all_of_it, -1e4)
    if correction != "none":
        problem["match"] = k.clone()
    if correction in ("apart", "before decay"):
        # A correction of at most 1/2 along a direction of its own keeps states bounded.
        problem["erase"] = 0.25 * beta * F.normalize(normal(*times, groups, n), dim=-1)
        problem["match_before_decay"] = correction == "before decay"
    if own:
        problem["own"] = normal(*times, heads)
    problem["initial_state"] = normal(b, heads, n, p)
    return problem


def list_options() -> list[dict[str, Any]]:
    """Return every combination of options that is allowed, as arguments of `draw_problem`."""
    return [
        {"decay": decay, "correction": correction, "writes": writes, "own": own}
        for decay in DECAYS
        for correction in CORRECTIONS
        for writes, own in ((None, False), (None, True), (1, False), (3, False), (3, True))
    ]


def differentiate(form, problem: dict[str, Any], **options) -> dict[str, Tensor]:
    """Return y, the last state, and the gradients of a sum over both with unlike weights."""
    leaves = {
        name: z.detach().clone().requires_grad_() if isinstance(z, Tensor) else z
        for name, z in problem.items()
    }
    y, state = form(**leaves, **options)
    loss = torch.zeros((), dtype=torch.float64)
    for z in (y, state):
        weights = torch.arange(z.numel(), dtype=torch.float64).cos().view_as(z)
        loss = loss + (z.double() * weights).sum()
    tensors = {name: z for name, z in leaves.items() if isinstance(z, Tensor)}
    # A single token that starts from no state does not depend on its decay.
    found = torch.autograd.grad(loss, list(tensors.values()), materialize_grads=True)
    gradients = {f"gradient of {name}": g for name, g in zip(tensors, found, strict=True)}
    return {"y": y.detach(), "state": state.detach(), **gradients}


def find_errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest error of each tensor, relative to its largest number."""
    return {
        name: ((actual[name].double() - z).abs().max() / z.abs().max().clamp(min=1e-30)).item()
        for name, z in expected.items()
    }

"""The law of padding: what a mask leaves out is as if it were not there."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lab.laws.probes import Probes, draw, relative
from lab.laws.verdict import Errors, Verdict, compared
from lab.layers.state import Decoder

PATTERNS = ("left", "right", "scattered")


def padding(module: nn.Module, probes: Probes) -> Verdict:
    """Padding moves no real position, no state and no gradient, and nothing is NaN.

    Each row is padded by its own amounts, with numbers far larger than the real ones; one more row
    is padding alone. Both a fresh state and a carried one go on through it.
    """
    if not isinstance(module, Decoder):
        missing = "the module has no start, prefill and step"
        return Verdict("padding", "not applicable", missing)
    return compared("padding", module, probes, _errors)


def _errors(module: nn.Module, x: Tensor) -> Errors:
    assert isinstance(module, Decoder)
    b, t, d = x.shape
    after = draw((b + 1, 4, d), seed=t).to(x)
    with torch.no_grad():
        y, end = module.prefill(x)
        more, last = module.prefill(after[:b, :3], end)
        final, _ = module.step(after[:b, 3], last)
        fresh, _ = module.step(after[b:, 3], module.start(1))
    for seed, pattern in enumerate(PATTERNS):
        keep = _keep(pattern, b, t, seed).to(x.device)
        with torch.no_grad():
            found, state = module.prefill(_padded(x, keep), None, keep)
            yield _not_finite(found), f"{pattern} padding gives NaN or infinity"
            words = f"{pattern} padding moves a real position's output"
            yield relative(found[keep].view_as(y) - y, y), words
            keep = _keep(pattern, b, 3, seed + 1).to(x.device)
            found, state = module.prefill(_padded(after[:b, :3], keep), state, keep)
            yield _not_finite(found), f"{pattern} padding after a state gives NaN or infinity"
            words = f"{pattern} padding moves an output after it, by the state"
            yield relative(found[keep].view_as(more) - more, more), words
            found, _ = module.step(after[:, 3], state)
            words = f"{pattern} padding moves a step after it, by the state"
            yield relative(found[:b] - final, final), words
            words = f"a row of padding alone moves the step after it, {pattern}"
            yield relative(found[b:] - fresh, fresh), words
    yield from _gradient_errors(module, x)


def _gradient_errors(module: Decoder, x: Tensor) -> Errors:
    """Masks that meet an infinity give NaN backward where forward looks right."""
    keep = _keep("left", *x.shape[:2], seed=0).to(x.device)
    inputs = _padded(x, keep).requires_grad_()
    y = module.prefill(inputs, None, keep)[0][keep]
    if y.requires_grad:
        (grad,) = torch.autograd.grad(y, inputs, draw(y.shape, seed=0).to(y))
        yield _not_finite(grad), "left padding gives NaN or infinity as gradient"
        yield relative(grad[~keep], grad), "a padded position gets a gradient"


def _keep(pattern: str, b: int, t: int, seed: int) -> Bool[Tensor, "rows length"]:
    """Return where b rows of t tokens stand among padding, each otherwise; the last row has none.

    The length is t + 1 + t // 2 in all.
    """
    spare = 1 + t // 2
    generator = torch.Generator().manual_seed(seed)
    keep = torch.zeros(b + 1, t + spare, dtype=torch.bool)
    for row in range(b):
        if pattern == "scattered":
            keep[row, torch.randperm(t + spare, generator=generator)[:t]] = True
            continue
        # The first row has all its padding on the side that is named, the others a part.
        near = spare if row == 0 else int(torch.randint(spare + 1, (), generator=generator))
        first = near if pattern == "left" else spare - near
        keep[row, first : first + t] = True
    return keep


def _padded(
    x: Float[Tensor, "b t d"], keep: Bool[Tensor, "rows length"]
) -> Float[Tensor, "rows length d"]:
    """Return the rows of x where they are kept, large numbers elsewhere."""
    padded = 30 * draw((*keep.shape, x.shape[-1]), seed=keep.shape[1]).to(x)
    padded[keep] = x.flatten(0, 1)
    return padded


def _not_finite(y: Tensor) -> float:
    return 0.0 if y.isfinite().all() else float("inf")

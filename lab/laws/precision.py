"""The law of precision: in fp32 and bf16 a module errs no more than rounding makes it."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lab.laws.arithmetic import Exact, RoundedAngles
from lab.laws.copying import copied
from lab.laws.probes import Probes, draw, longest_input, precision_name
from lab.laws.reproduction import written
from lab.laws.verdict import Verdict

ROUNDINGS = 64
QUANTILES = (0.5, 0.9)
DTYPES = (torch.float32, torch.bfloat16)


def precision(module: nn.Module, probes: Probes) -> Verdict:
    """In fp32 and bf16 the error against fp64, same weights and input, is that of rounding.

    A working precision of unit roundoff u rounds every intermediate result by up to u. What one
    rounding of everything does is measured, in fp64: each entry of the input and the parameters is
    moved by u times a normal number. Between two of them a module rounds no more than 64 times;
    roundings are as good as independent, and their errors add as a root: 8 times what was measured.
    Angles are no parameter, and lose more the later they stand: what rounding every angle to fp32
    does is measured too, by rounding what sin, cos, polar and a complex exp are given, and allowed
    8 times. In bf16 they are held to fp32 as well (erratum R7).

    Errors are those of tokens, |Δy_t| / |y_t|, and their median and their upper tenth are held to
    the same of the measured ones: a choice that rounding flips moves a few tokens by far, in both.
    In the reference, what the module casts to less stays in fp64.

    Source: the first-order rule, error ≲ roundings · condition · u.
    """
    law = "precision"
    if probes.dtype != torch.float64:
        return Verdict(law, "not decided", "the module does not run in fp64: nothing to hold it to")
    x = longest_input(module, probes.input(1, 1), probes.rounding_len)
    found, nearest = [], 0.0
    for dtype in DTYPES:
        name = precision_name(dtype)
        try:
            errors, allowed = rounding_errors(module, x, dtype)
        except (RuntimeError, ValueError) as error:
            return Verdict(law, "not decided", f"the module does not run in {name}: {error}")
        if not all(map(math.isfinite, allowed)):
            words = f"in {name}, or in fp64, the output of length {x.shape[1]} is not finite"
            return Verdict(law, "not decided", words)
        # NaN is over any bound.
        over = [not e <= a for e, a in zip(errors, allowed, strict=True)]
        words = [
            f"{name}: {e:.2g} of {a:.2g} allowed at quantile {q}"
            for e, a, q in zip(errors, allowed, QUANTILES, strict=True)
        ]
        found += words
        if any(over):
            q = over.index(True)
            counterexample = f"length {x.shape[1]}: {words[q]}"
            snippet = _snippet(probes, x, dtype, q, counterexample)
            evidence = "; ".join(found)
            return Verdict(law, "fails", evidence, counterexample, errors[q], allowed[q], snippet)
        shares = [e / a for e, a in zip(errors, allowed, strict=True) if a]
        nearest = max(nearest, *shares, 0.0)
    evidence = f"relative errors at length {x.shape[1]}: {'; '.join(found)}"
    return Verdict(law, "holds", evidence, measured=nearest, allowed=1.0)


def _snippet(probes: Probes, x: Tensor, dtype: torch.dtype, quantile: int, words: str) -> str:
    body = f"""
        x = draw((1, {x.shape[1]}, {x.shape[2]}), seed={x.shape[1]})
        errors, allowed = rounding_errors(module, x, {dtype})
        print("relative errors of tokens at quantiles", QUANTILES, errors, "of", allowed, "allowed")
        sys.exit(not errors[{quantile}] <= allowed[{quantile}])
    """
    return written(probes.origin, (draw, rounding_errors), body, f"precision: {words}")


@torch.no_grad()
def rounding_errors(
    module: nn.Module, x: Float[Tensor, "1 t d"], dtype: torch.dtype
) -> tuple[list[float], list[float]]:
    """Return the quantiles of the tokens' errors, and what is allowed them."""
    low = copied(module).to(dtype)
    # The reference has the weights and the input as they were rounded once.
    exact, rounded_x = copied(low).double(), x.to(dtype).double()
    y = exactly(exact, rounded_x)
    error = _of_tokens(low(x.to(dtype)), y)
    with RoundedAngles():
        from_angles = _of_tokens(exactly(exact, rounded_x), y)
    unit = torch.finfo(dtype).eps / 2
    moved = copied(exact)
    tensors = [*moved.parameters(), *(b for b in moved.buffers() if b.is_floating_point())]
    for seed, tensor in enumerate(tensors, 1):
        tensor.mul_(1 + unit * draw(tensor.shape, seed).to(tensor))
    moved_x = rounded_x * (1 + unit * draw(x.shape, seed=0).to(rounded_x))
    from_one = _of_tokens(exactly(moved, moved_x), y)
    quantiles = torch.tensor(QUANTILES, dtype=y.dtype, device=y.device)
    allowed = ROUNDINGS**0.5 * (from_one.quantile(quantiles) + from_angles.quantile(quantiles))
    return error.quantile(quantiles).tolist(), allowed.tolist()


def exactly(module: nn.Module, x: Tensor) -> Tensor:
    """Return the output in fp64 throughout, or as the module computes it where that cannot be."""
    try:
        with Exact():
            return module(x)
    # What it casts meets what it made in the lower precision.
    except RuntimeError:
        return module(x)


def _of_tokens(y: Float[Tensor, "b t d"], reference: Float[Tensor, "b t d"]) -> Tensor:
    """Return each token's error relative to its own output."""
    difference, scale = (y - reference).norm(dim=-1), reference.norm(dim=-1)
    return (difference / scale).where(difference != 0, 0).flatten()

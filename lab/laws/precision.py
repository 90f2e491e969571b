"""The law of precision: in fp32 and bf16 a module errs no more than rounding explains."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lab.laws.law import Law
from lab.laws.noise import Exact, RoundedAngles
from lab.laws.probes import Probes, copy_module, draw, draw_longest, name_precision
from lab.laws.reproduction import write_program
from lab.laws.verdict import Verdict, describe_refusal

ROUNDINGS = 64
QUANTILES = (0.5, 0.9)
DTYPES = (torch.float32, torch.bfloat16)
LARGEST = 1.0
"""Error from which on nothing is left of the right output, so a bound above it says nothing."""


def judge(module: nn.Module, probes: Probes) -> Verdict:
    """In fp32 and bf16 the error against fp64, same weights and input, is that of rounding.

    A working precision with unit roundoff u rounds every intermediate result by up to u. The effect
    of rounding everything once is measured in fp64: each entry of the input and the parameters is
    moved by u times a normal number. Between two parameters a module rounds at most 64 times; the
    errors are nearly independent and add as a root: 8 times what was measured is allowed. Angles
    are no parameters, and lose more at later positions: the effect of rounding every angle to fp32,
    the argument of sin, cos, polar and complex exp, is measured too, and 8 times it is allowed. The
    output's own rounding adds u, where nothing else moves it, as in a saturated tanh.
    Angles of a module in bf16 must be as good as fp32 as well (erratum R7).

    Errors are per token, |Δy_t| / |y_t|; their median and their 0.9 quantile must not exceed those
    allowed, because a choice that rounding flips moves a few tokens far, in both. The reference
    stays in fp64 where the module casts to a lower precision.

    Source: the first-order rule, error ≲ roundings · condition · u.
    """
    if probes.dtype != torch.float64:
        words = "the module does not run in fp64, so there is no reference"
        return Verdict(LAW.name, "not decided", words)
    x = draw_longest(module, probes.input(1, 1), probes.settings.rounding_len)
    found, nearest = [], 0.0
    for dtype in DTYPES:
        name = name_precision(dtype)
        try:
            errors, allowed = measure_rounding(module, x, dtype)
        except Exception as error:
            return Verdict(
                LAW.name,
                "not decided",
                f"the module does not run in {name}: {describe_refusal(error)}",
            )
        if not all(map(math.isfinite, allowed)):
            words = f"in {name}, or in fp64, the output of length {x.shape[1]} is not finite"
            return Verdict(LAW.name, "not decided", words)
        if min(allowed) >= LARGEST and all(map(math.isfinite, errors)):
            words = f"in {name}, rounding alone may move half of the outputs by {min(allowed):.2g}"
            return Verdict(LAW.name, "not decided", f"{words} at length {x.shape[1]}")
        # NaN is above any bound.
        over = [not e <= a for e, a in zip(errors, allowed, strict=True)]
        words = [
            f"{name}, quantile {q}: {e:.2g} ({a:.2g} allowed)"
            for e, a, q in zip(errors, allowed, QUANTILES, strict=True)
        ]
        found += words
        if any(over):
            q = over.index(True)
            counterexample = f"length {x.shape[1]}: {words[q]}"
            snippet = _write_snippet(probes, x, dtype, q, counterexample)
            evidence, error, bound = "; ".join(found), errors[q], allowed[q]
            return Verdict(LAW.name, "fails", evidence, counterexample, error, bound, snippet)
        shares = [e / a for e, a in zip(errors, allowed, strict=True) if a]
        nearest = max(nearest, *shares, 0.0)
    evidence = f"relative errors at length {x.shape[1]}: {'; '.join(found)}"
    return Verdict(LAW.name, "holds", evidence, measured=nearest, allowed=1.0)


LAW = Law("precision", judge)


def _write_snippet(probes: Probes, x: Tensor, dtype: torch.dtype, quantile: int, words: str) -> str:
    body = f"""
        x = draw((1, {x.shape[1]}, {x.shape[2]}), seed={x.shape[1]})
        errors, allowed = measure_rounding(module, x, {dtype})
        print("relative errors of tokens at quantiles", QUANTILES, errors, "of", allowed, "allowed")
        sys.exit(not errors[{quantile}] <= allowed[{quantile}])
    """
    uses = (draw, measure_rounding)
    return write_program(probes.origin, uses, body, f"{LAW.name}: {words}")


@torch.no_grad()
def measure_rounding(
    module: nn.Module, x: Float[Tensor, "1 t d"], dtype: torch.dtype
) -> tuple[list[float], list[float]]:
    """Return the quantiles of the tokens' errors in a precision, and their bounds."""
    low = copy_module(module).to(dtype)
    # The reference has the weights and the input after one rounding.
    exact, rounded_x = copy_module(low).double(), x.to(dtype).double()
    y = call_exactly(exact, rounded_x)
    error = measure_tokens(low(x.to(dtype)), y)
    with RoundedAngles():
        from_angles = measure_tokens(call_exactly(exact, rounded_x), y)
    unit = torch.finfo(dtype).eps / 2
    moved = copy_module(exact)
    tensors = [*moved.parameters(), *(b for b in moved.buffers() if b.is_floating_point())]
    for seed, tensor in enumerate(tensors, 1):
        tensor.mul_(1 + unit * draw(tensor.shape, seed).to(tensor))
    moved_x = rounded_x * (1 + unit * draw(x.shape, seed=0).to(rounded_x))
    from_one = measure_tokens(call_exactly(moved, moved_x), y)
    quantiles = torch.tensor(QUANTILES, dtype=y.dtype, device=y.device)
    inside = ROUNDINGS**0.5 * (from_one.quantile(quantiles) + from_angles.quantile(quantiles))
    allowed = inside + unit  # of the output itself, which is rounded even where nothing moves it
    return error.quantile(quantiles).tolist(), allowed.tolist()


def call_exactly(module: nn.Module, x: Tensor) -> Tensor:
    """Return the output computed in fp64 throughout, or as it is where the module refuses that."""
    try:
        with Exact():
            return module(x)
    # A tensor that stayed in fp64 meets one that the module created in a lower precision.
    except Exception:
        return module(x)


def measure_tokens(y: Float[Tensor, "b t d"], reference: Float[Tensor, "b t d"]) -> Tensor:
    """Return each token's error relative to the norm of its own output."""
    difference, scale = (y - reference).norm(dim=-1), reference.norm(dim=-1)
    return (difference / scale).where(difference != 0, 0).flatten()

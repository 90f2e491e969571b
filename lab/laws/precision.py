"""The law of precision: in fp32 and bf16 a module errs no more than rounding makes it."""

from copy import deepcopy

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lab.laws.probes import Probes, draw, longest_input, precision_name
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

    Source: the first-order rule, error ≲ roundings · condition · u.
    """
    law = "precision"
    if probes.inputs[0].dtype != torch.float64:
        return Verdict(law, "not decided", "the module does not run in fp64: nothing to hold it to")
    x = longest_input(module, probes.inputs[0], probes.rounding_len)[:, : probes.rounding_len]
    found = []
    for dtype in DTYPES:
        name = precision_name(dtype)
        try:
            errors, allowed = _errors(module, x, dtype)
        except (RuntimeError, ValueError) as error:
            return Verdict(law, "not decided", f"the module does not run in {name}: {error}")
        # NaN is over any bound.
        over = [not e <= a for e, a in zip(errors, allowed, strict=True)]
        words = [
            f"{name}: {e:.2g} of {a:.2g} allowed at quantile {q}"
            for e, a, q in zip(errors, allowed, QUANTILES, strict=True)
        ]
        found += words
        if any(over):
            worst = words[over.index(True)]
            return Verdict(law, "fails", "; ".join(found), f"length {x.shape[1]}: {worst}")
    return Verdict(law, "holds", f"relative errors at length {x.shape[1]}: {'; '.join(found)}")


@torch.no_grad()
def _errors(
    module: nn.Module, x: Float[Tensor, "1 t d"], dtype: torch.dtype
) -> tuple[list[float], list[float]]:
    """Return the quantiles of the tokens' errors, and what is allowed them."""
    low = deepcopy(module).to(dtype)
    # The reference has the weights and the input as they were rounded once.
    exact, rounded_x = deepcopy(low).double(), x.to(dtype).double()
    y = exact(rounded_x)
    error = _of_tokens(low(x.to(dtype)), y)
    with _RoundedAngles():
        from_angles = _of_tokens(exact(rounded_x), y)
    unit = torch.finfo(dtype).eps / 2
    moved = deepcopy(exact)
    tensors = [*moved.parameters(), *(b for b in moved.buffers() if b.is_floating_point())]
    for seed, tensor in enumerate(tensors, 1):
        tensor.mul_(1 + unit * draw(tensor.shape, seed).to(tensor))
    moved_x = rounded_x * (1 + unit * draw(x.shape, seed=0).to(rounded_x))
    from_one = _of_tokens(moved(moved_x), y)
    quantiles = torch.tensor(QUANTILES, dtype=y.dtype, device=y.device)
    allowed = ROUNDINGS**0.5 * (from_one.quantile(quantiles) + from_angles.quantile(quantiles))
    return error.quantile(quantiles).tolist(), allowed.tolist()


def _of_tokens(y: Float[Tensor, "b t d"], reference: Float[Tensor, "b t d"]) -> Tensor:
    """Return each token's error relative to its own output."""
    difference, scale = (y - reference).norm(dim=-1), reference.norm(dim=-1)
    return (difference / scale).where(difference != 0, 0).flatten()


class _RoundedAngles(TorchDispatchMode):
    """Rounds to fp32 the angles that sin, cos, polar and a complex exponential are given."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operation = func.overloadpacket
        if operation in _IN_PLACE:
            args[0].copy_(_rounded(args[0], real=operation is not torch.ops.aten.exp_))
        elif operation in _ANGLES:
            i = _ANGLES[operation]
            angles = _rounded(args[i], real=operation is not torch.ops.aten.exp)
            args = (*args[:i], angles, *args[i + 1 :])
        return func(*args, **(kwargs or {}))


# Where the angles stand among the arguments.
_ANGLES = {
    torch.ops.aten.cos: 0,
    torch.ops.aten.sin: 0,
    torch.ops.aten.exp: 0,
    torch.ops.aten.polar: 1,
}
_IN_PLACE = (torch.ops.aten.cos_, torch.ops.aten.sin_, torch.ops.aten.exp_)


def _rounded(x: Tensor, real: bool) -> Tensor:
    """Return x with its angles as fp32 has them: the imaginary part, or all where it is real."""
    if x.is_complex():
        return torch.complex(x.real, x.imag.float().to(x.imag.dtype))
    return x.float().to(x.dtype) if real and x.is_floating_point() else x

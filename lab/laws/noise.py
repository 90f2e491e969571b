"""The noise floor: how far rounding moves a module's output, and where the module rounds."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lab.laws.probes import copy_module, draw

CASTS = ("to", "float", "half", "bfloat16", "type", "type_as")
LOWER = (torch.float32, torch.bfloat16, torch.float16)
ANGLES = {"cos": 0, "sin": 0, "exp": 0, "polar": 1}
"""The argument that holds the angles, by function."""
IN_PLACE = ("cos_", "sin_", "exp_")


class Exact(TorchFunctionMode):
    """Keeps tensors in fp64 that a module casts to less, to measure the errors of those casts.

    Numbers beside tensors are rounded to fp32, as the weights are rounded: 0.98 is another number
    in fp32, and its powers differ, whatever is rounded after it.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call a function without its cast."""
        kwargs = dict(kwargs or {})
        if any(isinstance(a, Tensor) for a in args):
            args = [_round_number(a) if type(a) is float else a for a in args]
        given = args[0] if args else None
        if kwargs.get("dtype") in LOWER:
            kwargs["dtype"] = torch.float64
        name = getattr(func, "__name__", "")
        if name == "rms_norm" and len(args) < 4 and kwargs.get("eps") is None:
            # The default eps depends on the precision; a difference of eps is no rounding error.
            kwargs["eps"] = torch.finfo(torch.float32).eps
        found = func(*args, **kwargs)
        if name in CASTS and isinstance(found, Tensor) and isinstance(given, Tensor):
            return given.to(found.device, torch.float64) if found.dtype in LOWER else found
        return found


def _round_number(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()


class RoundedResults(TorchFunctionMode):
    """Moves each result that depends on weights or the input as rounding may, not what is in place.

    Args:
        unit: size of the roundings.
    """

    def __init__(self, unit: float):
        super().__init__()
        self.unit, self.generator = unit, torch.Generator().manual_seed(0)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call a function and move what it returns."""
        found = func(*args, **(kwargs or {}))
        if not isinstance(found, Tensor) or not found.requires_grad or found._is_view():
            return found
        if args and found is args[0]:
            return found
        # Roundings of a state that hardly changes go the same way.
        noise = BIAS + torch.randn(found.shape, generator=self.generator).to(found)
        return found * (1 + self.unit * noise)


class FixedAngles(TorchFunctionMode):
    """Collects the arguments of sin, cos and polar that do not depend on the input.

    The input must require a gradient, and nothing else.

    Attributes:
        angles: the arguments, in the order of the calls.
    """

    def __init__(self):
        super().__init__()
        self.angles: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call a function and keep its angles."""
        name = getattr(func, "__name__", "").removesuffix("_")
        if name in ROTATIONS and len(args) > ANGLES[name]:
            given = args[ANGLES[name]]
            if isinstance(given, Tensor) and given.is_floating_point() and not given.requires_grad:
                self.angles.append(given.detach().double().clone())
        return func(*args, **(kwargs or {}))


class CallCounter(TorchFunctionMode):
    """Counts calls of torch functions."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call a function and count it."""
        self.count += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def count_calls(module: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Return how many torch functions a module calls on an input."""
    with CallCounter() as calls:
        module(x)
    return calls.count


class RoundedAngles(TorchFunctionMode):
    """Rounds the angles in arguments of sin, cos, polar and complex exponentials to fp32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call a function on rounded angles."""
        name = getattr(func, "__name__", "")
        if name in IN_PLACE:
            args[0].copy_(_round(args[0], real=name != "exp_"))
        elif name in ANGLES and len(args) > ANGLES[name]:
            i = ANGLES[name]
            args = (*args[:i], _round(args[i], real=name != "exp"), *args[i + 1 :])
        return func(*args, **(kwargs or {}))


def _round(x: Tensor, real: bool) -> Tensor:
    """Round angles to fp32: the imaginary part of complex x, or all of x if `real`."""
    if x.is_complex():
        return torch.complex(x.real, x.imag.float().to(x.imag.dtype))
    return x.float().to(x.dtype) if real and x.is_floating_point() else x


BIAS = 0.25
"""Mean of the numbers that stand for roundings, of which the standard deviation is 1."""
ROTATIONS = ("cos", "sin", "polar")


def in_double(module: nn.Module, x: Tensor) -> tuple[nn.Module, torch.dtype]:
    """Return a copy of the module in fp64, or in its own precision, and which of them it is.

    The copy has not been called: a module may remember its calls.

    A module may refuse fp64: a cast to fp32 inside meets an fp64 weight, or a kernel lacks it, and
    then its compiler raises an error of its own class.
    """
    double = copy_module(module).double()
    try:
        with torch.no_grad():
            double(x.double())
    except Exception:
        return copy_module(module), find_own_precision(module)
    return copy_module(module).double(), torch.float64


def find_own_precision(module: nn.Module) -> torch.dtype:
    """Return the precision of a module's first weights; fp32 without any."""
    dtypes = (p.dtype for p in module.parameters() if p.is_floating_point())
    return next(dtypes, torch.float32)


class LowestPrecision(TorchFunctionMode):
    """Records the lowest precision to which a module rounds results, and cosines of angles.

    Attributes:
        rounded: the lowest precision to which a tensor was cast with a loss, or computed.
        angles: the lowest precision of cosines, sines and polar numbers.
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.rounded = self.angles = dtype

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call a function and record the precision of what it returns."""
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.is_floating_point():
            name, given = getattr(func, "__name__", ""), args[0] if args else None
            if name in ROTATIONS:
                self.angles = lower_precision(self.angles, found.dtype)
            if isinstance(given, Tensor) and given.is_floating_point():
                lost = lower_precision(given.dtype, found.dtype) != given.dtype
                # A cast may lose nothing, e.g. of whole numbers.
                if lost and not (name in CASTS and torch.equal(found.to(given.dtype), given)):
                    self.rounded = lower_precision(self.rounded, found.dtype)
        return found


def lower_precision(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """Return the lower of two precisions."""
    return max(first, second, key=lambda dtype: torch.finfo(dtype).eps)


@torch.no_grad()
def find_precisions(
    module: Callable[[Tensor], Tensor], x: Tensor
) -> tuple[torch.dtype, torch.dtype]:
    """Return the lowest precision to which a module rounds what it computes, and its angles.

    A cast whose remainder is added elsewhere rounds nothing: the output is the same without casts.
    """
    with LowestPrecision(x.dtype) as seen:
        y = module(x)
    rounded = seen.rounded
    if rounded != x.dtype == torch.float64:
        try:
            with Exact():
                exact = module(x)
        except Exception:
            exact = y * math.nan
        if relative_error(exact - y, y) <= 64 * torch.finfo(x.dtype).eps:
            rounded = x.dtype
    return rounded, lower_precision(rounded, seen.angles)


def noise_floor(
    module: Callable[[Tensor], Tensor], x: Float[Tensor, "b t d"], inside: torch.dtype
) -> float:
    """Return how far rounding moves the module's output, relative to its largest entry.

    Moving x by ±h, h = √eps, shows two things: the module's slope, so how far one rounding of x
    moves the output, eps·|y₊ - y|/h; and its deviation from a straight line, |y₊ + y₋ - 2y|, which
    is rounding once curvature, h² = eps, is no larger, and which is large for modules that are not
    deterministic. Where the precision inside is lower, a result there may flip by one unit of that
    precision; the floor is at least a sixteenth of it. It is infinite if an output is not finite.
    """
    with torch.no_grad():
        y = module(x)
        eps = torch.finfo(torch.promote_types(x.dtype, y.dtype)).eps
        step = x * eps**0.5 * draw(x.shape, seed=1).sign().to(x)
        ahead, behind = module(x + step), module(x - step)
    if not y.isfinite().all():
        return math.inf
    steepness = relative_error(ahead - y, y) * eps**0.5
    flips = torch.finfo(inside).eps / 16 * max(1.0, steepness / eps)
    return max(eps, flips, steepness, relative_error(ahead + behind - 2 * y, y))


def relative_error(difference: Tensor, reference: Tensor) -> float:
    """Return the largest entry of a difference over that of a reference; NaN stays NaN."""
    if not difference.numel():
        return 0.0
    size, scale = difference.abs().max().item(), reference.abs().max().item()
    if size == 0:
        return 0.0
    return size / scale if scale else float("inf")

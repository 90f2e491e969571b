"""What modules are tried on, and how exactly a module can be expected to answer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lab.laws.arithmetic import CASTS, Exact
from lab.laws.copying import copied
from lab.laws.refusal import REFUSALS
from lab.laws.reproduction import Origin

TURNS = ("cos", "sin", "polar")


@dataclass(frozen=True)
class Probes:
    """What laws try a module on, and how much they may spend.

    Args:
        d_model: width of the inputs [b t d].
        lengths: their lengths t, shortest first.
        batch: their rows b.
        seed: what they are drawn from.
        dtype: the precision in which the module runs.
        device: where it runs.
        max_len: tokens after which `stable` is content.
        rounding_len: tokens of the input on which `precision` counts roundings; angles and running
            sums go wrong late.
        seconds: what a law may take; what it has not tried by then it says.
        compiler: torch.compile's backend; None compiles nothing.
        inside: the lowest precision to which the module rounds what it computes.
        angles: the same with the angles of rotations, which matter where positions shift.
        same_shape: whether only calls of one shape compare, as the module draws random numbers.
        origin: how the module came to be, for reproductions.
    """

    d_model: int
    lengths: Sequence[int]
    batch: int = 3
    seed: int = 0
    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    max_len: int = 65_536
    rounding_len: int = 1024
    seconds: int | float = 5.0
    compiler: str | None = None
    inside: torch.dtype = torch.float64
    angles: torch.dtype = torch.float64
    same_shape: bool = False
    origin: Origin = field(default_factory=Origin)

    def input(self, length: int, batch: int | None = None) -> Float[Tensor, "b t d"]:
        """Return the probe of a length."""
        shape = (self.batch if batch is None else batch, length, self.d_model)
        return draw(shape, self.seed).to(self.device, self.dtype)

    @property
    def inputs(self) -> list[Float[Tensor, "b t d"]]:
        """The probes, shortest first."""
        return [self.input(length) for length in self.lengths]


def in_double(module: nn.Module, x: Tensor) -> tuple[nn.Module, torch.dtype]:
    """Return a copy of the module in fp64, or in its own precision, and which it is.

    A module may refuse fp64: by a cast to fp32 inside that meets an fp64 weight, or for a kernel.
    """
    double = copied(module).double()
    try:
        with torch.no_grad():
            double(x.double())
    except REFUSALS:
        dtype = next((p.dtype for p in module.parameters()), torch.float32)
        return copied(module), dtype
    return double, torch.float64


class Lowest(TorchFunctionMode):
    """Sees to which precisions a module rounds what it computes, and its angles' cosines.

    Attributes:
        rounded: the lowest to which something was cast that it does not hold, or computed.
        angles: the lowest of cosines, sines and polar numbers.
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.rounded = self.angles = dtype

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call a function and look at what it returns."""
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.is_floating_point():
            name, given = getattr(func, "__name__", ""), args[0] if args else None
            if name in TURNS:
                self.angles = _lower(self.angles, found.dtype)
            if isinstance(given, Tensor) and given.is_floating_point():
                lost = _lower(given.dtype, found.dtype) != given.dtype
                # Whole numbers, say, lose nothing in less.
                if lost and not (name in CASTS and torch.equal(found.to(given.dtype), given)):
                    self.rounded = _lower(self.rounded, found.dtype)
        return found


def _lower(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    return max(first, second, key=lambda dtype: torch.finfo(dtype).eps)


@torch.no_grad()
def precisions_inside(
    module: Callable[[Tensor], Tensor], x: Tensor
) -> tuple[torch.dtype, torch.dtype]:
    """Return the lowest precision to which a module rounds what it makes of x, and its angles.

    A cast whose rest is added elsewhere rounds nothing: without casts the output is the same.
    """
    with Lowest(x.dtype) as seen:
        y = module(x)
    rounded = seen.rounded
    if rounded != x.dtype == torch.float64:
        try:
            with Exact():
                exact = module(x)
        except REFUSALS:
            exact = y * math.nan
        if relative(exact - y, y) <= 64 * torch.finfo(x.dtype).eps:
            rounded = x.dtype
    return rounded, _lower(rounded, seen.angles)


def noise_floor(
    module: Callable[[Tensor], Tensor], x: Float[Tensor, "b t d"], inside: torch.dtype
) -> float:
    """Return how far rounding moves the module's output, relative to its largest entry.

    Moving x to and fro by h = √eps tells two things: how steep the module is, so how far one
    rounding of x moves it, eps·|y₊ - y|/h, and how far it is from a straight line, |y₊ + y₋ - 2y|,
    which is rounding once curvature, h² = eps, is no larger, and sees modules that are not
    deterministic. Where the precision inside is lower, what is rounded there may flip by a unit of
    it, a sixteenth of which is the least floor. An output that is not finite has none: infinity.
    """
    with torch.no_grad():
        y = module(x)
        eps = torch.finfo(torch.promote_types(x.dtype, y.dtype)).eps
        step = x * eps**0.5 * draw(x.shape, seed=1).sign().to(x)
        ahead, behind = module(x + step), module(x - step)
    if not y.isfinite().all():
        return math.inf
    steepness = relative(ahead - y, y) * eps**0.5
    flips = torch.finfo(inside).eps / 16 * max(1.0, steepness / eps)
    return max(eps, flips, steepness, relative(ahead + behind - 2 * y, y))


def relative(difference: Tensor, reference: Tensor) -> float:
    """Return the largest entry of a difference over that of a reference; NaN stays NaN."""
    if not difference.numel():
        return 0.0
    size, scale = difference.abs().max().item(), reference.abs().max().item()
    if size == 0:
        return 0.0
    return size / scale if scale else float("inf")


def draw(shape: Sequence[int], seed: int) -> Tensor:
    """Return normal numbers in fp64 that depend on shape and seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


def described(probes: Probes) -> str:
    """Return the words for the inputs: their lengths, and their precision."""
    lengths = ", ".join(map(str, probes.lengths))
    return f"lengths {lengths} in {precision_name(probes.dtype)}"


def precision_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without torch's."""
    return str(dtype).removeprefix("torch.")


def longest_input(module: nn.Module, like: Tensor, length: int) -> Tensor:
    """Return one row of the length, or of the largest half, quarter … that the module takes.

    A module with a table of positions refuses what is longer, or looks past the table's end.
    """
    while True:
        x = draw((1, length, like.shape[-1]), seed=length).to(like)
        try:
            with torch.no_grad():
                module(x)
        except REFUSALS:
            if length == 1:
                raise
            length //= 2
        else:
            return x

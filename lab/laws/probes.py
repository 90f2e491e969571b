"""Probes: the inputs, lengths and conditions that laws try a module under."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lab.certify_settings import QUICK, CertifySettings, Weights
from lab.laws.reproduction import Origin
from lab.seeding import fix_seed


def copy_module(module: nn.Module) -> nn.Module:
    """Return a deep copy whose parameters are leaves and require gradients where the originals do.

    Parameters of a copied ScriptModule would otherwise be results, which collect no gradients.
    """
    with torch.no_grad():
        copy = deepcopy(module)
    for ours, theirs in zip(copy.parameters(), module.parameters(), strict=True):
        if ours.requires_grad != theirs.requires_grad:
            ours.requires_grad_(theirs.requires_grad)
    return copy


@dataclass(frozen=True)
class Probes:
    """What laws try a module on.

    Args:
        settings: with the width of the inputs, their lengths, shortest first, and their own seed.
        dtype: the precision in which the module runs.
        own: the precision that the module was made in.
        inside: the lowest precision to which the module rounds what it computes.
        angles: the same, the angles of rotations included, which matter where positions shift.
        same_shape: whether only calls with inputs of the same shape can be compared, because the
            module draws random numbers or computes in half precision.
        origin: how the module was made, for reproductions.
        longer: further lengths, to be tried with fewer trials while there is time.
        undecoded: why the module's way of decoding could not be used; empty if it has none.
    """

    settings: CertifySettings
    dtype: torch.dtype = torch.float64
    own: torch.dtype = torch.float64
    inside: torch.dtype = torch.float64
    angles: torch.dtype = torch.float64
    same_shape: bool = False
    origin: Origin = field(default_factory=Origin)
    longer: Sequence[int] = ()
    undecoded: str = ""

    @property
    def d_model(self) -> int:
        """The width d of the inputs [b t d]."""
        assert self.settings.d_model is not None
        return self.settings.d_model

    @property
    def lengths(self) -> Sequence[int]:
        """The lengths t of the inputs, shortest first."""
        assert self.settings.lengths is not None
        return self.settings.lengths

    @property
    def most_rows(self) -> int:
        """Rows of the largest batch that there is time for."""
        return 520 if self.settings.seconds > QUICK.seconds else 65

    @property
    def device(self) -> torch.device:
        """Where the module runs."""
        return torch.device(self.settings.device)

    @property
    def inputs(self) -> list[Float[Tensor, "b t d"]]:
        """The probes, shortest first."""
        return [self.input(length) for length in self.lengths]

    def input(self, length: int, batch: int | None = None) -> Float[Tensor, "b t d"]:
        """Return the probe of a length."""
        rows = self.settings.batch if batch is None else batch
        x = draw((rows, length, self.d_model), self.settings.seed)
        return x.to(self.device, self.dtype)

    def with_lengths(self, lengths: Sequence[int]) -> "Probes":
        """Return these probes at other lengths."""
        return replace(self, settings=replace(self.settings, lengths=lengths))

    def describe(self) -> str:
        """Describe the inputs: their lengths and their precision."""
        lengths = ", ".join(map(str, self.lengths))
        return f"lengths {lengths} in {name_precision(self.dtype)}"

    def print_input(self, batch: int, length: int) -> str:
        """Return the line of a reproduction that draws an input."""
        shape = f"({batch}, {length}, {self.d_model})"
        seed, device = self.settings.seed, self.device.type
        return f"x = draw({shape}, seed={seed}).to({device!r}, {self.dtype})"


def draw(shape: Sequence[int], seed: int) -> Tensor:
    """Return normal numbers in fp64 that depend on shape and seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


def draw_longest(module: nn.Module, like: Tensor, length: int) -> Tensor:
    """Return one row of the length, or of the largest half, quarter … that the module takes.

    A module with a table of positions refuses longer rows, or reads past the table's end.
    """
    while True:
        x = draw((1, length, like.shape[-1]), seed=length).to(like)
        try:
            with torch.no_grad():
                module(x)
        except Exception:
            if length == 1:
                raise
            length //= 2
        else:
            return x


def name_precision(dtype: torch.dtype) -> str:
    """Return a dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")


LENGTHS = (1, 2, 3, 7, 16, 33, 65, 130)
"""One, primes, a power of two, and lengths that exceed chunks of 32 or 64 by one or two tokens."""
LONGER, MULTIPLES = (48, 128, 257, 513, 1025, 2049, 4097), (96, 192, 256, 384)
"""Lengths that are tried with fewer trials while there is time: sizes of chunks, lengths beyond
caches and tables of common sizes, and then further multiples of chunks."""
CHUNKS = ("chunk", "block_size", "window")
LONGEST_CHUNK = 256
LONGEST = 8193
"""Largest size around which lengths are tried."""
MOST_NAMED = 12


def find_lengths_around_chunks(module: nn.Module) -> list[int]:
    """Return lengths just above one and two chunks, blocks or windows that attributes name."""
    sizes = {
        value
        for part in module.modules()
        for name, value in vars(part).items()
        if type(value) is int and any(word in name for word in CHUNKS)
    }
    return sorted(
        {
            length
            for size in sizes
            if 1 < size <= LONGEST_CHUNK
            for length in (size + 1, 2 * size + 1)
        }
    )


def find_longer_lengths(module: nn.Module) -> list[int]:
    """Return lengths above `LENGTHS`, and those at and above sizes that the module names.

    These are whole numbers among its attributes and those of its configuration, and the shapes of
    its buffers, for example of a mask. Of many sizes the smallest are taken.
    """
    named = sorted({size for size in _list_sizes(module) if LENGTHS[-2] < size < LONGEST})
    named = named[:MOST_NAMED]
    first, second = sorted({*LONGER, *(n + 1 for n in named)}), sorted({*MULTIPLES, *named})
    return [n for n in dict.fromkeys((*first, *second)) if n not in LENGTHS]


def _list_sizes(module: nn.Module) -> Iterator[int]:
    for part in module.modules():
        for owner in (part, *(getattr(part, name, None) for name in ("config", "cfg", "args"))):
            fields: dict[str, Any] = owner if isinstance(owner, dict) else vars(owner or object)
            yield from (v for v in dict(fields).values() if type(v) is int)
        for buffer in part.buffers(recurse=False):
            yield from buffer.shape


def apply_condition(module: nn.Module, weights: Weights, seed: int, training: bool) -> nn.Module:
    """Return a copy of the module with the weights and the mode of a condition."""
    if weights == "moved":
        module = move_constants(module, seed)
    elif weights == "larger":
        module = enlarge(module)
    else:
        module = copy_module(module)
    return module.train(training)


@torch.no_grad()
def move_constants(module: nn.Module, seed: int) -> nn.Module:
    """Return a copy with noise on trainable entries that were not drawn: zeros and constants.

    A projection, a gate or a key table that is initialised to zero hides faults behind it. Zeros,
    in any parameter, become normal numbers with standard deviation 0.5; a parameter whose entries
    are all equal is multiplied by exp(0.3 · normal), which keeps its sign.
    """
    module = copy_module(module)
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.requires_grad and parameter.is_floating_point():
            noise = noise.to(parameter)
            varied = parameter * (0.3 * noise).exp() if is_constant(parameter) else parameter
            parameter.copy_(torch.where(parameter == 0, noise / 2, varied))
    return module


@torch.no_grad()
def enlarge(module: nn.Module) -> nn.Module:
    """Return a copy whose trainable parameters of two or more axes are three times as large."""
    module = copy_module(module)
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            parameter.mul_(3)
    return module


def is_constant(parameter: Tensor) -> bool:
    """Whether all entries are the same number."""
    return parameter.numel() > 0 and bool((parameter == parameter.flatten()[0]).all())


class Seeded(nn.Module):
    """A wrapper that makes a module draw the same random numbers, e.g. for dropout, every call."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """Return the module's output from the same random state."""
        with fix_seed(0, x.device):
            return self.module(x)

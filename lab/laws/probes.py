"""Probes: the inputs that laws try a module on, and what is known of the module by then."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lab.certify_settings import QUICK, CertifySettings
from lab.laws.reproduction import Origin


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

"""What a model is made of: its blocks, what repeats, and the parameters each part holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn

from lab.models.language_model import Block, LanguageModel


@runtime_checkable
class Sparse(Protocol):
    """A layer of which a token uses a part only."""

    @property
    def idle_parameters(self) -> int:
        """How many of the layer's parameters a token leaves alone."""
        ...


@dataclass(frozen=True)
class Part:
    """A layer, or a table.

    Attributes:
        name: its class.
        note: its sizes and readings, in the layer's own words.
        parameters: numbers it holds.
        active: of these, how many one token uses.
    """

    name: str
    note: str
    parameters: int
    active: int


@dataclass(frozen=True)
class Pair:
    """A block: what mixes and what transforms, each with the norm before it."""

    mixer: Part | None
    transform: Part | None


@dataclass(frozen=True)
class Run:
    """Neighbouring blocks that are alike."""

    pair: Pair
    times: int


@dataclass(frozen=True)
class Anatomy:
    """A whole model.

    Attributes:
        embedding: the table of tokens.
        unit: the runs of blocks that, repeated, make the stack.
        times: how often the unit stands in the stack.
        head: the last norm, and the linear head where it is not the table itself.
    """

    embedding: Part
    unit: tuple[Run, ...]
    times: int
    head: Part

    @property
    def parts(self) -> list[Part]:
        """Every part, each as often as it stands in the model."""
        blocks = [run.pair for run in self.unit for _ in range(run.times)] * self.times
        layers = [part for pair in blocks for part in (pair.mixer, pair.transform) if part]
        return [self.embedding, *layers, self.head]

    @property
    def total(self) -> int:
        """Parameters of the model, tied ones once."""
        return sum(part.parameters for part in self.parts)

    @property
    def active(self) -> int:
        """Parameters that one token uses; a tied table counts whole: the head reads it all."""
        return sum(part.active for part in self.parts)


def anatomy(model: LanguageModel) -> Anatomy:
    """Return what a model is made of; a model on the meta device will do."""
    pairs = []
    for block in model.blocks:
        assert isinstance(block, Block)
        pairs.append(Pair(_part(block.mixer, block.norm_mixer), _part(block.mlp, block.norm_mlp)))
    unit = pairs[: _period(pairs)]
    rows, width = model.embed.weight.shape
    tied = model.head.weight is model.embed.weight
    norm = model.norm_final.weight.numel()
    read = 0 if tied else rows * width
    return Anatomy(
        embedding=Part(
            "Embedding",
            f"{rows:,} tokens × {width}" + (", also the head" if tied else ""),
            rows * width,
            rows * width if tied else width,
        ),
        unit=tuple(_runs(unit)),
        times=len(pairs) // len(unit),
        head=Part(
            "RMSNorm and head", "the embedding table" if tied else "", norm + read, norm + read
        ),
    )


def _part(layer: nn.Module | None, norm: nn.Module | None) -> Part | None:
    if layer is None or norm is None:
        return None
    held = sum(p.numel() for module in (layer, norm) for p in module.parameters())
    idle = layer.idle_parameters if isinstance(layer, Sparse) else 0
    return Part(type(layer).__name__, layer.extra_repr(), held, held - idle)


def _period(pairs: Sequence[Pair]) -> int:
    """Return the length of the shortest beginning that, repeated, makes the whole."""
    n = len(pairs)
    return next(
        p for p in range(1, n + 1) if n % p == 0 and all(pairs[i] == pairs[i % p] for i in range(n))
    )


def _runs(pairs: Sequence[Pair]) -> list[Run]:
    runs: list[Run] = []
    for pair in pairs:
        if runs and runs[-1].pair == pair:
            runs[-1] = Run(pair, runs[-1].times + 1)
        else:
            runs.append(Run(pair, 1))
    return runs

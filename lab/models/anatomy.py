"""The parts of a model: its blocks, what repeats, and how many parameters each part has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn

from lab.models.language_model import LanguageModel

HEADS = {"RMS": "RMSNorm and head", "LN": "LayerNorm and head", None: "Head"}
"""What a model ends with, by the type of its last norm."""


@runtime_checkable
class Sparse(Protocol):
    """A layer that uses only some of its parameters for a token."""

    @property
    def idle_parameters(self) -> int:
        """How many of the layer's parameters a token does not use."""
        ...


@dataclass(frozen=True)
class Part:
    """A layer, or a table.

    Attributes:
        name: its class.
        note: its sizes and options, from the layer's `extra_repr`.
        parameters: how many it has.
        active: how many of them one token uses.
    """

    name: str
    note: str
    parameters: int
    active: int


@dataclass(frozen=True)
class Pair:
    """A block: its mixer and its state transform, each with the norm before it."""

    mixer: Part | None
    transform: Part | None


@dataclass(frozen=True)
class Repeat:
    """Consecutive blocks that are alike."""

    pair: Pair
    times: int


@dataclass(frozen=True)
class Anatomy:
    """A whole model.

    Attributes:
        embedding: the embedding table, or the linear map that reads vectors.
        unit: the shortest sequence of blocks that, repeated, makes the stack.
        times: how often the unit is repeated.
        head: the last norm, and the linear head unless it is the embedding table.
    """

    embedding: Part
    unit: tuple[Repeat, ...]
    times: int
    head: Part

    @property
    def parts(self) -> list[Part]:
        """All parts, each as often as the model has it."""
        blocks = [repeat.pair for repeat in self.unit for _ in range(repeat.times)] * self.times
        layers = [part for pair in blocks for part in (pair.mixer, pair.transform) if part]
        return [self.embedding, *layers, self.head]

    @property
    def total(self) -> int:
        """Parameters of the model; tied ones count once."""
        return sum(part.parameters for part in self.parts)

    @property
    def active(self) -> int:
        """Parameters that one token uses; all of a tied table, since the head reads all of it."""
        return sum(part.active for part in self.parts)


def dissect(model: LanguageModel) -> Anatomy:
    """Return the parts of a model, which may be on the meta device."""
    pairs = []
    for block in model.list_blocks():
        pairs.append(
            Pair(
                _describe_part(block.mixer, block.norm_mixer),
                _describe_part(block.mlp, block.norm_mlp),
            )
        )
    unit = pairs[: _find_period(pairs)]
    rows, width = model.cfg.d_vocab, model.cfg.d_model
    tied = model.head.weight is model.embed.weight
    norm = sum(p.numel() for p in model.norm_final.parameters())
    read = 0 if tied else sum(p.numel() for p in model.head.parameters())
    if rows:
        note = f"{rows:,} tokens × {width}" + (", also the head" if tied else "")
        embedding = Part("Embedding", note, rows * width, rows * width if tied else width)
    else:
        held = sum(p.numel() for p in model.embed.parameters())
        embedding = Part("Linear", f"{model.embed.in_features:,} numbers × {width}", held, held)
    return Anatomy(
        embedding=embedding,
        unit=tuple(_group_alike(unit)),
        times=len(pairs) // len(unit),
        head=Part(
            HEADS[model.cfg.normalization_type],
            "the embedding table" if tied else "",
            norm + read,
            norm + read,
        ),
    )


def _describe_part(layer: nn.Module | None, norm: nn.Module | None) -> Part | None:
    if layer is None or norm is None:
        return None
    held = sum(p.numel() for module in (layer, norm) for p in module.parameters())
    idle = layer.idle_parameters if isinstance(layer, Sparse) else 0
    return Part(type(layer).__name__, layer.extra_repr(), held, held - idle)


def _find_period(pairs: Sequence[Pair]) -> int:
    """Return the length of the shortest prefix that, repeated, makes the whole."""
    n = len(pairs)
    return next(
        p for p in range(1, n + 1) if n % p == 0 and all(pairs[i] == pairs[i % p] for i in range(n))
    )


def _group_alike(pairs: Sequence[Pair]) -> list[Repeat]:
    repeats: list[Repeat] = []
    for pair in pairs:
        if repeats and repeats[-1].pair == pair:
            repeats[-1] = Repeat(pair, repeats[-1].times + 1)
        else:
            repeats.append(Repeat(pair, 1))
    return repeats

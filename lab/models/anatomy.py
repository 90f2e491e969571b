"""The parts of a model: blocks, what repeats, parameters of each part, and the mixers' states."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from torch import nn

from lab.abilities import StateCounter
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
class StateSize:
    """How much of one row decoding keeps.

    Attributes:
        tokens: of the row, all read.
        bytes: of all tensors that it keeps, in the model's own precision; None if not known.
        unknown: why it is not known; "" if it is.
    """

    tokens: int
    bytes: int | None
    unknown: str = ""

    def __str__(self) -> str:
        """Return it in words."""
        if self.bytes is None:
            return f"not known: {self.unknown}"
        return f"{self.bytes:,} bytes at {self.tokens:,} tokens"


def measure_state(counter: StateCounter, tokens: int) -> StateSize:
    """Return how much of a row of so many tokens a model or a block keeps."""
    try:
        return StateSize(tokens, counter.state_bytes(tokens))
    except ValueError as error:
        return StateSize(tokens, None, str(error))


@dataclass(frozen=True)
class Part:
    """A layer, or a table.

    Attributes:
        name: its class.
        note: its sizes and options, from the layer's `extra_repr`.
        parameters: how many it has.
        active: how many of them one token uses.
        state: what a mixer keeps of a row; None for other parts, and where it was not asked for.
    """

    name: str
    note: str
    parameters: int
    active: int
    state: StateSize | None = None


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
        state: what all mixers together keep of a row; None where it was not asked for.
    """

    embedding: Part
    unit: tuple[Repeat, ...]
    times: int
    head: Part
    state: StateSize | None = None

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


def dissect(model: LanguageModel, tokens: int | None = None) -> Anatomy:
    """Return the parts of a model, which may be on the meta device.

    Args:
        model: the model.
        tokens: of a row whose state is measured; None: it is not.
    """
    pairs = [
        Pair(
            _describe_part(block.mixer, block.norm_mixer),
            _describe_part(block.mlp, block.norm_mlp),
        )
        for block in model.list_blocks()
    ]
    state = None
    if tokens is not None:
        pairs, state = _measure_states(model, pairs, tokens)
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
        state=state,
    )


def _measure_states(
    model: LanguageModel, pairs: Sequence[Pair], tokens: int
) -> tuple[list[Pair], StateSize]:
    """Return the blocks with their mixers' states, and the state of the whole.

    Mixers of the lab that are alike are measured once; a user's may differ in what it does not say.
    """
    measured: dict[Part, StateSize] = {}
    found: list[Pair] = []
    for block, pair in zip(model.list_blocks(), pairs, strict=True):
        if pair.mixer is not None:
            size = measured.get(pair.mixer) or measure_state(block, tokens)
            if type(block.mixer).__module__.startswith("lab."):
                measured[pair.mixer] = size
            pair = replace(pair, mixer=replace(pair.mixer, state=size))
        found.append(pair)
    sizes = [pair.mixer.state.bytes for pair in found if pair.mixer and pair.mixer.state]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):  # the model knows why, or counts one cache of all its layers
        return found, measure_state(model, tokens)
    return found, StateSize(tokens, sum(known))


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

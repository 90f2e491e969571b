"""The sequence mixers that a stack names: what each is, its options, and its state's size.

To add one, write its class and its line in `MIXERS`.
"""

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Unpack, get_args, get_origin, get_type_hints

from lab.layers.attention import Attention
from lab.layers.family.based import Based
from lab.layers.family.comba import Comba
from lab.layers.family.deltanet import DeltaNet
from lab.layers.family.deltaproduct import GatedDeltaProduct
from lab.layers.family.differential import DifferentialAttention
from lab.layers.family.distance import ALiBi, ForgettingAttention
from lab.layers.family.gated_deltanet import GatedDeltaNet
from lab.layers.family.gla import GatedLinearAttention
from lab.layers.family.hgrn2 import HGRN2
from lab.layers.family.hyena import Hyena
from lab.layers.family.kda import KimiDeltaAttention
from lab.layers.family.linear_attention import LinearAttention
from lab.layers.family.log_linear import LogLinearAttention
from lab.layers.family.mamba import Mamba1
from lab.layers.family.mamba3 import Mamba3
from lab.layers.family.mingru import MinGRU
from lab.layers.family.mlstm import MLSTM
from lab.layers.family.retnet import Retention
from lab.layers.family.rglru import RGLRU
from lab.layers.family.rwkv6 import RWKV6
from lab.layers.family.rwkv7 import RWKV7
from lab.layers.family.sliding_window import SlidingWindowAttention
from lab.layers.family.stickbreaking import StickBreakingAttention
from lab.layers.family.ttt import TTTLinear
from lab.layers.inner_function import InnerFunctionAttention
from lab.layers.mixer import Mixer
from lab.layers.ssd import SSD
from lab.models.block import Block

TOKENS = 256, 512
"""Lengths of the two rows of which a mixer's state is measured."""


@dataclass(frozen=True)
class MixerKind:
    """A mixer of the lab.

    Attributes:
        cls: the layer, whose constructor takes d_model first; its other arguments are options.
        says: what it is, in a few words.
        source: where it was published: an arXiv number, or the paper.
        letter: the paper's for it, which a stack may give in place of the word.
    """

    cls: type[Mixer]
    says: str
    source: str
    letter: str = ""


MIXERS = {
    "attention": MixerKind(Attention, "softmax over all earlier tokens", "1706.03762", "A"),
    "ssd": MixerKind(SSD, "a decaying state: state space duality", "2405.21060", "S"),
    "ifa": MixerKind(
        InnerFunctionAttention, "attention whose values tokens look up", "the paper", "I"
    ),
    "linear": MixerKind(LinearAttention, "a sum over the past in place of a softmax", "2006.16236"),
    "based": MixerKind(Based, "the same, near a softmax: its Taylor series", "2402.18668"),
    "retnet": MixerKind(Retention, "a sum over the past that fades", "2307.08621"),
    "gla": MixerKind(GatedLinearAttention, "key channels that fade as tokens say", "2312.06635"),
    "hgrn2": MixerKind(HGRN2, "key channels that write what they forget", "2404.07904"),
    "mlstm": MixerKind(MLSTM, "an LSTM with a matrix as its cell", "2405.04517"),
    "rwkv6": MixerKind(RWKV6, "fading key channels, and a shift by a token", "2404.05892"),
    "mamba": MixerKind(Mamba1, "a small state a channel: a selective scan", "2312.00752"),
    "mingru": MixerKind(MinGRU, "a running mean a channel, gated", "2410.01201"),
    "rglru": MixerKind(RGLRU, "a decaying number a channel, gated", "2402.19427"),
    "loglinear": MixerKind(
        LogLinearAttention, "a state for each power of two of tokens", "2506.04761"
    ),
    "hyena": MixerKind(Hyena, "a gated convolution with the whole past", "2302.10866"),
    "mamba3": MixerKind(Mamba3, "a trapezoidal rule, rotated as tokens say", "2603.15569"),
    "deltanet": MixerKind(DeltaNet, "writes replace what is held: the delta rule", "2406.06484"),
    "gdn": MixerKind(GatedDeltaNet, "the delta rule, with decay", "2412.06464"),
    "kda": MixerKind(KimiDeltaAttention, "the delta rule; key channels fade", "2510.26692"),
    "deltaproduct": MixerKind(GatedDeltaProduct, "several delta rules a token", "2502.10297"),
    "comba": MixerKind(Comba, "a delta rule with feedback of its own", "2506.02475"),
    "rwkv7": MixerKind(RWKV7, "fading key channels, erased each at its rate", "2503.14456"),
    "ttt": MixerKind(TTTLinear, "a model that learns while it reads", "2407.04620"),
    "alibi": MixerKind(ALiBi, "softmax, scores falling with distance", "2108.12409"),
    "fox": MixerKind(ForgettingAttention, "softmax with forget gates", "2503.02130"),
    "window": MixerKind(SlidingWindowAttention, "softmax over the last tokens", "2004.05150"),
    "stickbreaking": MixerKind(
        StickBreakingAttention, "nearer keys first take their share", "2410.17980"
    ),
    "diff": MixerKind(DifferentialAttention, "the difference of two softmaxes", "2410.05258"),
}
"""The mixers by word."""


@dataclass(frozen=True)
class MixerSummary:
    """A mixer at its defaults.

    Attributes:
        name: its word in a stack.
        letter: the paper's for it, or empty.
        says: what it is.
        source: where it was published.
        fixed_bytes: what its state takes for one row, however many tokens it has read.
        token_bytes: what each further token adds.
        options: each with its default, and the values that it may have, where they are names.
    """

    name: str
    letter: str
    says: str
    source: str
    fixed_bytes: int
    token_bytes: int
    options: dict[str, dict[str, Any]]


def summarize_mixers(
    d_model: int, n_heads: int = 1, names: Iterable[str] = tuple(MIXERS)
) -> Iterator[MixerSummary]:
    """Yield mixers by name, each with its state at a width, in fp32.

    Raises:
        ValueError: for a width that a mixer's heads do not divide.
    """
    for name in names:
        kind = MIXERS[name]
        heads = {"n_heads": n_heads} if "n_heads" in read_parameters(kind.cls) else {}
        fixed, token = split_state(kind.cls(d_model, **heads), d_model)
        options = list_options(kind.cls)
        yield MixerSummary(name, kind.letter, kind.says, kind.source, fixed, token, options)


def split_state(mixer: Mixer, d_model: int) -> tuple[int, int]:
    """Return the bytes of a mixer's state for one row: those always there, and those a token."""
    short, long = map(Block(d_model, mixer, None).state_bytes, TOKENS)
    token = (long - short) // (TOKENS[1] - TOKENS[0])
    return long - token * TOKENS[1], token


def list_options(cls: type) -> dict[str, dict[str, Any]]:
    """Return a layer's options, each as in `MixerSummary`."""
    found = {}
    for name, (hint, default) in read_parameters(cls).items():
        values = get_args(hint) if get_origin(hint) is Literal else ()
        found[name] = {"default": default} | ({"values": values} if values else {})
    return found


def read_parameters(cls: type) -> dict[str, tuple[Any, Any]]:
    """Return a layer's arguments beside d_model: the annotation and the default of each.

    Options that a family of layers shares (`**shared: Unpack[Shared]`) are among them.
    """
    hints = get_type_hints(cls.__init__)
    found = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        if (
            parameter.kind is inspect.Parameter.VAR_KEYWORD
            and get_origin(hints.get(name)) is Unpack
        ):
            shared = get_type_hints(get_args(hints[name])[0])
            found |= {key: (shared[key], value) for key, value in cls.list_defaults().items()}
        elif name != "d_model":
            default = parameter.default
            implied = str if default in (None, inspect.Parameter.empty) else type(default)
            found[name] = hints.get(name, implied), default
    return found

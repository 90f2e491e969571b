"""Stack notation: which mixer and which state transform each block has, and their options.

`"SE*7 IE"` is seven blocks of an SSD mixer and a CDMoE, then one of inner function attention and
a CDMoE: the paper's pairs (tab:comparative_ffn). A mixer may also be given by its word, and a plus
sign: `"ssd+E*7 ifa+E"` is the same stack. Options are keyed by letter or word, or by block number
and letter or word: `{"S.d_state": 64, "7.ifa.mask": "soft"}`.
"""

import re
from collections.abc import Callable, Mapping
from inspect import Parameter
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from lab.models.mixers import MIXERS, read_parameters
from tasks.bounds import check_choice
from tasks.near_names import suggest

PAIR = re.compile(r"(?:(?P<word>\w+)\+|(?P<letter>.))(?P<transform>.)(?:\*(?P<times>\d+))?")
LETTERS = {name: kind.letter or name for name, kind in MIXERS.items()}
"""What stands for each word: the paper's letter, or the word itself."""
LARGEST = 2**40
"""Larger than any size of a layer; beyond 2^63 torch's own errors are hard to understand."""
MAX_BLOCKS = 1000
"""More is probably a typing error, and would fill the memory before any message."""


def parse_stack(
    stack: str, mixers: Mapping[str, object], transforms: Mapping[str, object]
) -> list[tuple[str, str]]:
    """Return the (mixer, state transform) of each block, by letter; words that have none stay.

    Raises:
        ValueError: for an unknown name, a word that is not a pair, no blocks, or too many.
    """
    blocks: list[tuple[str, str]] = []
    for word in stack.split():
        match = PAIR.fullmatch(word)
        if match is None:
            raise ValueError(
                f"stack={stack!r}: {word!r} is not a pair such as 'AM', 'SE*7' or 'ssd+M'"
            )
        named = match["word"] or match["letter"]
        mixer, transform = LETTERS.get(named, named), match["transform"]
        if mixer not in mixers and len(named) > 1:
            near = suggest(named, MIXERS)
            raise ValueError(f"stack={stack!r}: unknown mixer {named!r}. {near}")
        for kind, name, known in (("mixer", mixer, mixers), ("transform", transform, transforms)):
            if name not in known:
                letters = ", ".join(known)
                raise ValueError(f"stack={stack!r}: unknown {kind} {name!r}; known: {letters}")
        times = int(match["times"] or 1)
        if not 1 <= times <= MAX_BLOCKS - len(blocks):
            raise ValueError(
                f"stack={stack!r}: {word!r} repeats {times} times, must be ≥ 1 and leave the "
                f"stack at most {MAX_BLOCKS} blocks"
            )
        blocks += [(mixer, transform)] * times
    if not blocks:
        raise ValueError(f"stack={stack!r}: must name at least one pair")
    return blocks


def split_options(
    options: Mapping[str, Any], blocks: list[tuple[str, str]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Split options over the blocks: (mixer's, state transform's) for each.

    An option of one block (`1.A.mask`) overrides that of its letter (`A.mask`).

    Raises:
        ValueError: for a key of another form, or one that matches no layer of the stack.
    """
    split: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {}) for _ in blocks]
    for key in sorted(options, key=lambda key: key[:1].isdigit()):
        match = re.fullmatch(r"(?:(\d+)\.)?([A-Z]|[a-z]\w+)\.(\w+)", key)
        if match is None:
            raise ValueError(f"option {key!r}: must look like S.d_state, ssd.d_state or 1.A.mask")
        number, letter, name = match.groups()
        letter = LETTERS.get(letter, letter)
        met = False
        for i, letters in enumerate(blocks):
            for j in (0, 1):
                if letters[j] == letter and (number is None or int(number) == i):
                    split[i][j][name] = options[key]
                    met = True
        if not met:
            raise ValueError(f"option {key!r}: the stack of {len(blocks)} blocks has no such layer")
    return split


def make_layer(
    cls: type,
    letter: str,
    sizes: Mapping[str, int | None],
    options: Mapping[str, Any],
    construct: Callable[..., Any] | None = None,
) -> Any:
    """Construct a layer of width `sizes["d_model"]` with the arguments of `choose_arguments`.

    `construct`, if given, is called instead of the class.

    Raises:
        ValueError: for an unknown option (the known ones are listed) or a value of another type.
    """
    return (construct or cls)(sizes["d_model"], **choose_arguments(cls, letter, sizes, options))


def choose_arguments(
    cls: type, letter: str, sizes: Mapping[str, int | None], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments that a layer gets beside its width: the given options, and its heads.

    Text is read as the parameter's annotated type, or without one as the type of its default. A
    class with a parameter n_heads gets `sizes["n_heads"]`; if that is None it keeps its default,
    and gets 1 without one.

    Raises:
        ValueError: for an unknown option (the known ones are listed) or a value of another type.
    """
    parameters = read_parameters(cls)
    chosen: dict[str, Any] = {}
    heads = sizes["n_heads"]
    if "n_heads" in parameters and (heads or parameters["n_heads"][1] is Parameter.empty):
        chosen["n_heads"] = heads or 1
    for name, value in options.items():
        if name not in parameters:
            known = suggest(name, parameters) if parameters else "Known: none"
            raise ValueError(f"unknown option {letter}.{name}. {known}")
        chosen[name] = read_as(parameters[name][0], value, f"{letter}.{name}")
    return chosen


def read_as(annotation: Any, value: Any, name: str) -> Any:
    """Read a value, text perhaps, as an annotated type: int, float, bool, str, Literal, | None.

    Raises:
        ValueError: naming `name`, the value and what was expected.
    """
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        members = get_args(annotation)
        if NoneType in members and (value is None or value == "none"):
            return None
        return read_as(next(m for m in members if m is not NoneType), value, name)
    if origin is Literal:
        check_choice(name, value, get_args(annotation))
        return value
    if annotation is bool and isinstance(value, str):
        if value.lower() in ("true", "yes", "1"):
            return True
        if value.lower() in ("false", "no", "0"):
            return False
        raise ValueError(f"{name}={value}: must be true or false")
    if annotation in (int, float) and isinstance(value, str):
        try:
            number = annotation(value)
        except ValueError:
            expected = "a whole number" if annotation is int else "a number"
            raise ValueError(f"{name}={value}: must be {expected}") from None
        if annotation is int and not -LARGEST <= number <= LARGEST:
            raise ValueError(f"{name}={value}: must be at most {LARGEST:,}")
        return number
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if annotation in (int, float, str, bool) and type(value) is not annotation:
        raise ValueError(f"{name}={value!r}: must be of type {annotation.__name__}")
    return value

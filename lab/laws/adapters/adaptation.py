"""Finding out how a module is called, by trying or as its options say."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lab.laws.adapters.fitting import (
    BATCH,
    TOKENS,
    Fit,
    InputMaker,
    find_decoder,
    find_fit,
    write_recipe,
)
from lab.laws.adapters.kinds import is_hugging_face, list_forward_kinds
from lab.laws.adapters.tokens import BITS, DecodingTokens, Tokens
from lab.laws.probes import draw
from lab.laws.verdict import RefusalError, describe_refusal
from lab.layers.state import Decoder
from tasks.bounds import check_choice

INPUTS = ("hidden", "tokens")
LAYOUTS = ("btd", "tbd", "bdt")


@dataclass(frozen=True)
class AdapterOptions:
    """What the user says about a module's interface; None is found out by trying.

    Attributes:
        input: what the module reads, "hidden" [b t d] or "tokens" [b t]; None tries both.
        d_model: width d; None tries widths that the module names, and those of its weights.
        vocab_size: size of the vocabulary of a module that reads tokens; None looks for it.
        layout: order of its axes, "btd", "tbd" or "bdt"; None goes by `batch_first`, then tries.
        output: which item of a tuple or field of an object is the sequence; None takes the first.
        relative: whether the module claims that only differences of positions count; None goes by
            what is recognised.

    Raises:
        ValueError: for an option that is not among its values, or a size below 1.
    """

    input: str | None = None
    d_model: int | None = None
    vocab_size: int | None = None
    layout: str | None = None
    output: str | int | None = None
    relative: bool | None = None

    def __post_init__(self) -> None:
        for name, known in (("input", INPUTS), ("layout", LAYOUTS)):
            value = getattr(self, name)
            if value is not None:
                check_choice(name, value, known)
        for name in ("d_model", "vocab_size"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name}={size} must be at least 1")


WIDTHS = (
    "d_model",
    "hidden_size",
    "embed_dim",
    "embedding_dim",
    "n_embd",
    "dim",
    "input_size",
    "in_features",
    "in_channels",
    "input_dim",
    "d_in",
    "channels",
    "width",
)
VOCABULARIES = ("vocab_size", "n_vocab", "num_tokens", "num_embeddings", "vocab")
ANY_WIDTH = (16, 64)
"""Widths for a module without weights, which takes any."""
MOST = 24
"""Widths to try at most; the layers of a module have a few."""


def list_widths(target: Any) -> list[int]:
    """List the widths that a module's inputs may have, the likeliest first.

    First the widths that it or its configuration names; then those of its submodules, in order:
    in_features, normalized_shape, and the last and the second axes of their weights.
    """
    found = [
        *_find_sizes(target, WIDTHS),
        *(w for part in _list_parts(target) for w in _list_widths_read(part)),
    ]
    return [*dict.fromkeys(width for width in (*found, *ANY_WIDTH) if width > 0)][:MOST]


def list_vocabularies(target: Any) -> list[int]:
    """List the sizes that a module's vocabulary may have: those it names, and its tables'."""
    tables = (part for part in _list_parts(target) if isinstance(part, nn.Embedding))
    return [*_find_sizes(target, VOCABULARIES), *(table.num_embeddings for table in tables)]


def choose_vocabulary(target: Any, table: nn.Embedding | None) -> int:
    """Return the size of the vocabulary, as the module names it or as its table has rows.

    Args:
        target: the module.
        table: its embedding table, which may have spare rows; None if it was not found.
    """
    if table is None:
        return list_vocabularies(target)[0]
    return min([table.num_embeddings, *list(_find_sizes(target, VOCABULARIES))[:1]])


def _find_sizes(target: Any, names: tuple[str, ...]) -> Iterator[int]:
    """Yield positive integers among the attributes of a module or its configuration."""
    config = getattr(target, "config", None)
    for owner in (target, config, getattr(target, "args", None), getattr(target, "cfg", None)):
        for name in names:
            size = owner.get(name) if isinstance(owner, dict) else getattr(owner, name, None)
            if isinstance(size, int) and not isinstance(size, bool) and size > 0:
                yield size


def _list_parts(target: Any) -> Iterator[nn.Module]:
    """Yield a module and its submodules, or those of the module that a method is bound to."""
    owner = target if isinstance(target, nn.Module) else getattr(target, "__self__", None)
    if isinstance(owner, nn.Module):
        yield from owner.modules()


def _list_widths_read(part: nn.Module) -> Iterator[int]:
    yield from _find_sizes(part, WIDTHS)
    shape = getattr(part, "normalized_shape", ())
    yield from shape[-1:] if isinstance(shape, tuple) else ()
    for weight in part.parameters(recurse=False):
        yield from weight.shape[-1:]
        yield from weight.shape[1:2]


class Adapted(NamedTuple):
    """A foreign module as a module from [b t d] to [b t e].

    Attributes:
        module: the adapter that holds it, a `Decoder` if it can decode; or the module itself, if it
            needs no adapter.
        d_model: width d of the inputs to try it on.
        notes: what was recognised by trying.
        recipe: the expression that makes the adapter from a variable `module`.
        undecoded: why the module's way of decoding could not be used; empty if it has none.
    """

    module: nn.Module
    d_model: int
    notes: tuple[str, ...]
    recipe: str
    undecoded: str


def adapt_vectors(target: Any, tried: Any, known: AdapterOptions) -> Adapted:
    """Adapt a module that reads vectors [b t d].

    Args:
        target: the module.
        tried: a copy of it to try, in evaluation mode.
        known: what the user says about it.

    Raises:
        RefusalError: for a module that does not read vectors.
    """
    sizes = list_widths(target) if known.d_model is None else [known.d_model]

    def build_input_maker(width: int) -> InputMaker:
        return lambda t: match_module(tried, draw((BATCH, t, width), seed=t))

    try:
        fit = find_fit(
            tried, list_forward_kinds(target, known.layout), sizes, build_input_maker, known.output
        )
    except RefusalError as refusal:
        among = f"; widths {', '.join(map(str, sizes))} were tried" if len(sizes) > 1 else ""
        words = f"{refusal}{among}; d_model, layout, output or input may help"
        raise RefusalError(words) from refusal
    if not isinstance(target, Decoder):
        fit = find_decoder(tried, fit, build_input_maker(fit.width), known.relative)
    width = f"reads vectors of width {fit.width} (found by trying)"
    said = () if known.d_model is not None else (width,)
    return Adapted(
        fit.build(target), fit.width, (*said, *fit.notes), fit.write_recipe(), fit.undecoded
    )


def adapt_tokens(target: Any, tried: Any, known: AdapterOptions) -> Adapted:
    """Adapt a module that reads tokens [b t]; the adapter holds a copy, with a hook.

    Args:
        target: the module.
        tried: a copy of it to try, in evaluation mode.
        known: what the user says about it.

    Raises:
        RefusalError: for a module that does not read tokens.
    """
    least = min(
        list_vocabularies(target) if known.vocab_size is None else [known.vocab_size], default=0
    )
    if not least:
        raise RefusalError("its vocabulary size is not known; give it as vocab_size")

    def make_input(t: int) -> Tensor:
        # Two tokens, which any vocabulary has, in an order that no table of positions matches.
        return (draw((BATCH, t), seed=t) > 0).long().clamp(max=least - 1).to(_get_device(tried))

    try:
        kinds = list_forward_kinds(target, known.layout)
        fit = find_fit(tried, kinds, [TOKENS], lambda _: make_input, known.output)
    except RefusalError as refusal:
        words = f"{refusal} (tokens below {least}); vocab_size, layout or output may help"
        raise RefusalError(words) from refusal
    if not isinstance(target, Decoder):
        fit = find_decoder(tried, fit, make_input, known.relative)
    options: dict[str, Any] = {"vocab_size": known.vocab_size, "table": None}
    width = known.d_model or ANY_WIDTH[0]
    notes = ["no embedding was found, so its gradients are not tested"]
    table = _find_table(fit, tried, make_input(fit.length))
    if known.vocab_size is None:
        options["vocab_size"] = choose_vocabulary(target, None if table is None else table[1])
    if table is not None:
        path, found = table
        width = found.embedding_dim
        if known.d_model not in (None, width):
            raise RefusalError(f"d_model={known.d_model} must be {width}, the width of {path}")
        options["table"] = path if fit.adapter is None else f"module.{path}".rstrip(".")
        notes = [f"embedded by {path or 'the module itself'}"]
        if found.padding_idx is not None:
            options["skip"] = found.padding_idx
            notes.append(f"the padding token {found.padding_idx} is left out of inputs")
    held = fit.build(deepcopy(target))
    reader = DecodingTokens if isinstance(held, Decoder) else Tokens
    said = (
        f"reads tokens from a vocabulary of {options['vocab_size']}, {notes[0]}",
        *fit.notes,
        *notes[1:],
    )
    return Adapted(
        reader(held, **options),
        width + BITS,
        said,
        write_recipe(reader, fit.write_recipe(), options),
        fit.undecoded,
    )


@torch.no_grad()
def _find_table(fit: Fit, tried: Any, ids: Tensor) -> tuple[str, nn.Embedding] | None:
    """Return the embedding table that looks up the tokens of a call, with its name."""
    if not isinstance(tried, nn.Module):
        return None
    seen: list[nn.Embedding] = []

    def watch(table: nn.Embedding, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].flatten().equal(ids.flatten()):
            seen.append(table)

    tables = {name: m for name, m in tried.named_modules() if isinstance(m, nn.Embedding)}
    handles = [table.register_forward_pre_hook(watch) for table in tables.values()]
    fit.build(tried)(ids)
    for handle in handles:
        handle.remove()
    own = _get_own_table(tried)
    fits = (m for m in seen if own is None or m is own)
    return next(((name, m) for m in fits for name, it in tables.items() if it is m), None)


def _get_own_table(tried: Any) -> nn.Module | None:
    """Return the table that embeds tokens, where several read them and transformers knows which."""
    try:
        return tried.get_input_embeddings() if is_hugging_face(tried) else None
    except Exception:  # research code often does not define it
        return None


def match_module(module: Any, x: Tensor) -> Tensor:
    """Return x in the precision and on the device of a module."""
    dtypes = (p.dtype for p in _list_weights(module) if p.is_floating_point())
    return x.to(_get_device(module), next(dtypes, torch.get_default_dtype()))


def _get_device(module: Any) -> torch.device:
    return next((p.device for p in _list_weights(module)), torch.device("cpu"))


def _list_weights(module: Any) -> list[nn.Parameter]:
    """Return the parameters of a module, or of the module that a method is bound to."""
    owner = module if isinstance(module, nn.Module) else getattr(module, "__self__", None)
    return list(owner.parameters()) if isinstance(owner, nn.Module) else []


READERS = {"hidden": adapt_vectors, "tokens": adapt_tokens}


def adapt(target: nn.Module | Callable[..., Any], **options: Any) -> Adapted:
    """Find out by trying how a module is called, and make it one from [b t d] to [b t e].

    A copy is tried, in evaluation mode; the target is not changed. A module that reads tokens is
    held as a copy, with a hook on its embedding table (`lab.laws.adapters.tokens`).

    Args:
        target: a module, or a function.
        options: fields of `AdapterOptions`.

    Raises:
        ValueError: as `AdapterOptions`; for a module that takes or returns no sequence: says what
            was tried, and which option may help.
    """
    known = AdapterOptions(**options)
    tried = deepcopy(target)
    if isinstance(tried, nn.Module):
        tried.eval()
    refusals = []
    for way in (known.input,) if known.input else _list_inputs(target, known.vocab_size):
        try:
            return READERS[way](target, tried, known)
        except RefusalError as refusal:
            refusals.append(f"with {way} inputs, {refusal}")
    name = type(target).__name__ if isinstance(target, nn.Module) else _get_name(target)
    raise ValueError(f"found no way to call {name}: {'; '.join(refusals)}")


@torch.no_grad()
def find_lengths_taken(
    module: nn.Module, d_model: int, lengths: tuple[int, ...], batch: int
) -> tuple[tuple[int, ...], dict[int, str]]:
    """Return the lengths that a module from [b t d] takes, and the error for each other length.

    Args:
        module: in the mode to try.
        d_model: width d of the inputs.
        lengths: to try.
        batch: rows b to try with.
    """
    taken, refused = [], {}
    for length in lengths:
        try:
            y = module(match_module(module, draw((batch, length, d_model), length)))
            if y.shape[:2] != (batch, length):
                raise RefusalError(f"returned {list(y.shape)}")
        except Exception as error:
            refused[length] = describe_refusal(error)
        else:
            taken.append(length)
    return tuple(taken), refused


def _list_inputs(target: Any, vocab_size: int | None) -> tuple[str, ...]:
    """Return what a module may read, the likelier first."""
    if vocab_size is not None or is_hugging_face(target):
        return ("tokens",)
    return ("hidden", "tokens") if list_vocabularies(target) else ("hidden",)


def _get_name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)

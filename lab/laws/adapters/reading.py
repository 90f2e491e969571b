"""Adapting a module that reads vectors, or one that reads tokens."""

from copy import deepcopy
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
from lab.laws.adapters.options import AdapterOptions
from lab.laws.adapters.sizes import ANY_WIDTH, choose_vocabulary, list_vocabularies, list_widths
from lab.laws.adapters.tokens import BITS, DecodingTokens, Tokens
from lab.laws.probes import draw
from lab.laws.refusal import RefusalError
from lab.layers.state import Decoder


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

"""What a module reads: vectors, or tokens."""

from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lab.laws.adapters.fitting import BATCH, TOKENS, Fit, Give, decoding, fitted, recipe
from lab.laws.adapters.kinds import forward_kinds, is_hugging_face
from lab.laws.adapters.sizes import ANY_WIDTH, vocabularies, vocabulary, widths
from lab.laws.adapters.tokens import BITS, DecodingTokens, Tokens
from lab.laws.probes import draw
from lab.laws.refusal import RefusalError
from lab.layers.state import Decoder


class Adapted(NamedTuple):
    """A foreign module made a module from [b t d] to [b t e].

    Args:
        module: the adapter that holds it, a `Decoder` where it can be; or itself, if it needs none.
        d_model: width d of the inputs to try it on.
        notes: what was found by probing and recognised.
        recipe: the expression that makes the adapter from a variable `module`.
    """

    module: nn.Module
    d_model: int
    notes: tuple[str, ...]
    recipe: str


class Asked(NamedTuple):
    """What was said of a module; None is to be found out."""

    d_model: int | None
    vocab_size: int | None
    layout: str | None
    output: int | str | None
    relative: bool | None


def reading_vectors(target: Any, tried: Any, asked: Asked) -> Adapted:
    """Return the adapter of a module that reads [b t d].

    Args:
        target: the module.
        tried: a copy of it to probe, evaluating.
        asked: what was said of it.

    Raises:
        RefusalError: for one that does not.
    """
    sizes = widths(target) if asked.d_model is None else [asked.d_model]

    def giving(width: int) -> Give:
        return lambda t: like(tried, draw((BATCH, t, width), seed=t))

    try:
        fit = fitted(tried, forward_kinds(target, asked.layout), sizes, giving, asked.output)
    except RefusalError as refusal:
        among = f"; widths {', '.join(map(str, sizes))} were tried" if len(sizes) > 1 else ""
        words = f"{refusal}{among}: d_model, layout, output or input may help"
        raise RefusalError(words) from refusal
    if not isinstance(target, Decoder):
        fit = decoding(tried, fit, giving(fit.width), asked.relative)
    said = () if asked.d_model is not None else (f"width {fit.width}, found by probing",)
    return Adapted(fit.made(target), fit.width, (*said, *fit.notes), fit.recipe())


def reading_tokens(target: Any, tried: Any, asked: Asked) -> Adapted:
    """Return the adapter of a module that reads [b t]; it holds a copy, with a hook.

    Args:
        target: the module.
        tried: a copy of it to probe, evaluating.
        asked: what was said of it.

    Raises:
        RefusalError: for one that does not.
    """
    least = min(vocabularies(target) if asked.vocab_size is None else [asked.vocab_size], default=0)
    if not least:
        raise RefusalError("no size of a vocabulary is found: the option vocab_size may help")

    def give(t: int) -> Tensor:
        # Of so few tokens that any vocabulary has them, and in no order that positions have.
        return (draw((BATCH, t), seed=t) > 0).long().clamp(max=least - 1).to(_device(tried))

    try:
        kinds = forward_kinds(target, asked.layout)
        fit = fitted(tried, kinds, [TOKENS], lambda _: give, asked.output)
    except RefusalError as refusal:
        words = f"{refusal}, with tokens below {least}: vocab_size, layout or output may help"
        raise RefusalError(words) from refusal
    if not isinstance(target, Decoder):
        fit = decoding(tried, fit, give, asked.relative)
    options: dict[str, Any] = {"vocab_size": asked.vocab_size, "table": None}
    width = asked.d_model or ANY_WIDTH[0]
    notes = ["no embedding seen: its gradients are not tried"]
    table = _table(fit, tried, give(fit.length))
    if asked.vocab_size is None:
        options["vocab_size"] = vocabulary(target, None if table is None else table[1])
    if table is not None:
        path, found = table
        width = found.embedding_dim
        if asked.d_model not in (None, width):
            raise RefusalError(f"d_model={asked.d_model} must be {width}, the width of {path}")
        options["table"] = path if fit.adapter is None else f"module.{path}".rstrip(".")
        notes = [f"embedded at {path or 'itself'}"]
        if found.padding_idx is not None:
            options["skip"] = found.padding_idx
            notes.append(f"token {found.padding_idx}, padding, is never read")
    held = fit.made(deepcopy(target))
    reader = DecodingTokens if isinstance(held, Decoder) else Tokens
    said = (f"tokens of {options['vocab_size']}, {notes[0]}", *fit.notes, *notes[1:])
    return Adapted(
        reader(held, **options), width + BITS, said, recipe(reader, fit.recipe(), options)
    )


@torch.no_grad()
def _table(fit: Fit, tried: Any, ids: Tensor) -> tuple[str, nn.Embedding] | None:
    """Return the embedding table that reads the very tokens of a call, and its name."""
    if not isinstance(tried, nn.Module):
        return None
    seen: list[nn.Embedding] = []

    def watch(table: nn.Embedding, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].flatten().equal(ids.flatten()):
            seen.append(table)

    tables = {name: m for name, m in tried.named_modules() if isinstance(m, nn.Embedding)}
    handles = [table.register_forward_pre_hook(watch) for table in tables.values()]
    fit.made(tried)(ids)
    for handle in handles:
        handle.remove()
    # Its library knows better where a second table reads the same tokens.
    own: Any = getattr(tried, "get_input_embeddings", None) if is_hugging_face(tried) else None
    fits = (m for m in seen if own is None or m is own())
    return next(((name, m) for m in fits for name, it in tables.items() if it is m), None)


def like(module: Any, x: Tensor) -> Tensor:
    """Return x in a module's precision and on its device."""
    dtypes = (p.dtype for p in _weights(module) if p.is_floating_point())
    return x.to(_device(module), next(dtypes, torch.get_default_dtype()))


def _device(module: Any) -> torch.device:
    return next((p.device for p in _weights(module)), torch.device("cpu"))


def _weights(module: Any) -> list[nn.Parameter]:
    """Return the parameters of a module, or of the one that a method is bound to."""
    owner = module if isinstance(module, nn.Module) else getattr(module, "__self__", None)
    return list(owner.parameters()) if isinstance(owner, nn.Module) else []

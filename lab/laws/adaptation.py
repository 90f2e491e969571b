"""Finding out how a foreign module is called, by trying the rows of `KINDS` or as options say."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lab.abilities import Decoder
from lab.certify_settings import CertifySettings
from lab.laws.adapters import (
    Adapter,
    DecodingAdapter,
    Kind,
    advance_steps,
    call_returned,
    get_item,
    is_hugging_face,
    lay_out,
    list_kinds,
    make_state_argument,
)
from lab.laws.law import RefusalError, describe_refusal
from lab.laws.probes import draw
from lab.laws.tokens import BITS, DecodingTokens, Tokens

WIDTHS = (
    *("d_model", "hidden_size", "embed_dim", "embedding_dim", "n_embd", "dim", "input_size"),
    *("in_features", "in_channels", "input_dim", "d_in", "channels", "width"),
)
VOCABULARIES = ("vocab_size", "n_vocab", "num_tokens", "num_embeddings", "vocab")
ANY_WIDTH = (16, 64)
"""Widths for a module without weights, which takes any."""
MOST = 24
"""Widths to try at most; the layers of a module have a few."""


class Adapted(NamedTuple):
    """A foreign module as a module from [b t d] to [b t e].

    Attributes:
        module: the adapter that holds it, a `Decoder` if it can decode; or the module
            itself, if it needs no adapter.
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


def adapt(target: nn.Module | Callable[..., Any], **options: Any) -> Adapted:
    """Find out by trying how a module is called, and make it one from [b t d] to [b t e].

    A copy is tried, in evaluation mode; the target is not changed. A module that reads tokens is
    held as a copy, with a hook on its embedding table (`lab.laws.tokens`).

    Args:
        target: a module, or a function.
        options: the fields of `CertifySettings` that say how a module is called: input, d_model,
            vocab_size, layout, output and relative.

    Raises:
        ValueError: as `CertifySettings`; for a module that takes or returns no sequence: says what
            was tried, and which option may help.
    """
    known = CertifySettings(**options)
    tried = deepcopy(target)
    if isinstance(tried, nn.Module):
        tried.eval()
    refusals = []
    for way in (known.input,) if known.input else _list_inputs(target, known.vocab_size):
        try:
            return (adapt_tokens if way == "tokens" else adapt_vectors)(target, tried, known)
        except RefusalError as refusal:
            refusals.append(f"with {way} inputs, {refusal}")
    name = type(target).__name__
    if not isinstance(target, nn.Module):
        name = getattr(target, "__qualname__", name)
    raise ValueError(f"found no way to call {name}: {'; '.join(refusals)}")


def _list_inputs(target: Any, vocab_size: int | None) -> tuple[str, ...]:
    """Return what a module may read, the likelier first."""
    if vocab_size is not None or is_hugging_face(target):
        return ("tokens",)
    return ("hidden", "tokens") if list_vocabularies(target) else ("hidden",)


def adapt_vectors(target: Any, tried: Any, known: CertifySettings) -> Adapted:
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
        fit = find_fit(tried, known, sizes, build_input_maker)
    except RefusalError as refusal:
        among = f"; widths {', '.join(map(str, sizes))} were tried" if len(sizes) > 1 else ""
        words = f"{refusal}{among}; d_model, layout, output or input may help"
        raise RefusalError(words) from refusal
    if not isinstance(target, Decoder):
        fit = find_decoder(tried, fit, build_input_maker(fit.width), known.relative)
    width = f"reads vectors of width {fit.width} (found by trying)"
    said = () if known.d_model is not None else (width,)
    return Adapted(fit.build(target), fit.width, (*said, *fit.notes), fit.recipe, fit.undecoded)


def adapt_tokens(target: Any, tried: Any, known: CertifySettings) -> Adapted:
    """Adapt a module that reads tokens [b t], as `adapt_vectors`; it holds a copy, with a hook.

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
        fit = find_fit(tried, known, [TOKENS], lambda _: make_input)
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
    said = f"reads tokens from a vocabulary of {options['vocab_size']}, {notes[0]}"
    return Adapted(
        reader(held, **options),
        width + BITS,
        (said, *fit.notes, *notes[1:]),
        write_recipe(reader, fit.recipe, options),
        fit.undecoded,
    )


@torch.no_grad()
def _find_table(fit: "Fit", tried: Any, ids: Tensor) -> tuple[str, nn.Embedding] | None:
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
    model: Any = tried
    try:  # where several tables read tokens, transformers knows which embeds them
        own = model.get_input_embeddings() if is_hugging_face(model) else None
    except Exception:  # research code often does not define it
        own = None
    fits = (m for m in seen if own is None or m is own)
    return next(((name, m) for m in fits for name, it in tables.items() if it is m), None)


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


def _list_widths_read(part: nn.Module) -> Iterator[int]:
    yield from _find_sizes(part, WIDTHS)
    shape = getattr(part, "normalized_shape", ())
    yield from shape[-1:] if isinstance(shape, tuple) else ()
    for weight in part.parameters(recurse=False):
        yield from weight.shape[-1:]
        yield from weight.shape[1:2]


def list_vocabularies(target: Any) -> list[int]:
    """List the sizes that a module's vocabulary may have: those it names, and its tables'."""
    tables = (part for part in _list_parts(target) if isinstance(part, nn.Embedding))
    return [*_find_sizes(target, VOCABULARIES), *(table.num_embeddings for table in tables)]


def choose_vocabulary(target: Any, table: nn.Embedding | None) -> int:
    """Return the vocabulary's size, as the module names it or as its table, if found, has rows.

    The table may have spare rows.
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


def _get_owner(target: Any) -> nn.Module | None:
    """Return a module, or the module that a method is bound to."""
    owner = target if isinstance(target, nn.Module) else getattr(target, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def _list_parts(target: Any) -> list[nn.Module]:
    owner = _get_owner(target)
    return [] if owner is None else list(owner.modules())


def match_module(module: Any, x: Tensor) -> Tensor:
    """Return x in the precision and on the device of a module."""
    owner = _get_owner(module)
    weights = [] if owner is None else list(owner.parameters())
    dtypes = (p.dtype for p in weights if p.is_floating_point())
    return x.to(_get_device(module), next(dtypes, torch.get_default_dtype()))


def _get_device(module: Any) -> torch.device:
    owner = _get_owner(module)
    first = None if owner is None else next(owner.parameters(), None)
    return torch.device("cpu") if first is None else first.device


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


LENGTHS = (5, 8, 16, 64, 128, 256)
BATCH = 2
TOKENS = 0
"""Stands for the width of tokens, which have none."""
InputMaker = Callable[[int], Tensor]
"""Length → an input of the length."""
USUAL = {"calls": None, "output": None, "layout": "btd", "positioned": False, "paddings": ()}
"""Options of adapters that need not be given."""


@dataclass(frozen=True)
class Fit:
    """An adapter that takes a sequence, with the width and the length at which it did.

    Attributes:
        adapter: its class; None if the module needs none.
        options: its arguments.
        width: of the input.
        length: of the input.
        notes: what was recognised.
        undecoded: why the module's way of decoding could not be used; empty if it has none.
    """

    adapter: type[Adapter] | None
    options: dict[str, Any]
    width: int
    length: int
    notes: tuple[str, ...] = ()
    undecoded: str = ""

    def build(self, module: Any) -> nn.Module:
        """Build the adapter of a module."""
        return module if self.adapter is None else self.adapter(module, **self.options)

    @property
    def recipe(self) -> str:
        """The expression that makes the adapter from `module`."""
        return (
            "module" if self.adapter is None else write_recipe(self.adapter, "module", self.options)
        )


def write_recipe(adapter: type[nn.Module], inner: str, options: Mapping[str, Any]) -> str:
    """Write the expression that makes an adapter of what the expression `inner` makes."""
    words = [inner]
    for name, value in options.items():
        if name not in USUAL or value != USUAL[name]:
            words.append(f"{name}={value.__name__ if callable(value) else repr(value)}")
    return f"{adapter.__name__}({', '.join(words)})"


def find_fit(
    target: Any,
    known: CertifySettings,
    widths: Sequence[int],
    build_input_maker: Callable[[int], InputMaker],
) -> Fit:
    """Return the first way of calling a module in which it takes a sequence and returns one.

    A way that takes a single length is the last resort. If such a way also takes another width, it
    is rejected: the length then stands where the module expects the width.

    Args:
        target: the module.
        known: what the user says about it; `output` is the only place to look at, if not None.
        widths: widths to try.
        build_input_maker: returns the function that makes inputs of a width.

    Raises:
        RefusalError: if there is none.
    """
    refusals, resort = [], None
    ways = list(_list_ways(target, known.layout))
    for length in LENGTHS:
        for width in widths:
            make_input = build_input_maker(width)
            for kind, options, note in ways:
                given = make_input(length)
                try:
                    found = _try_way(target, kind, options, note, given, known.output)
                except Exception as error:
                    # Tokens have no third axis to transpose.
                    laid = lay_out(given, options["layout"]) if given.ndim > 2 else given
                    words = f"given {list(laid.shape)}, it {describe_refusal(error)}"
                    # A wrong output is more informative than an error.
                    more = isinstance(error, RefusalError) and length == LENGTHS[0]
                    refusals.insert(0 if more else len(refusals), words)
                    continue
                found = replace(found, width=width)
                if known.layout is None and options["layout"] == "btd" and given.ndim > 2:
                    found = _choose_first_axis(target, found, make_input)
                built = found.build(target)
                if any(_takes(built, make_input, t) for t in (length - 1, 2 * length)):
                    return found
                if width == TOKENS or not _takes(built, build_input_maker(width + 1), length):
                    resort = resort or found
    if resort is None:
        raise RefusalError([*refusals, "it takes a single length, but any width"][0])
    return resort


def _list_ways(target: Any, layout: str | None) -> Iterator[tuple[Kind, dict[str, Any], str]]:
    """Yield the ways of calling a module on a sequence, the likeliest first, with notes."""
    second = layout is None and _is_batch_second(target)
    layouts = ("tbd",) if second else (layout,) if layout else ("btd", "bdt")
    said = "takes time before batch ([t b d]), since its batch_first is False" if second else ""
    for kind in list_kinds(target):
        alone = kind.owns is not None
        for way, note in kind.list_calls(target):
            options = {"calls": kind.calls, **way}
            own = options.pop("layouts", None)
            words = note if own else "; ".join(filter(None, (said, note)))
            for each in own or (layouts[:1] if alone else layouts):
                yield kind, {**options, "layout": each}, words


@torch.no_grad()
def _choose_first_axis(target: Any, found: Fit, make_input: InputMaker) -> Fit:
    """Return a fit that takes [b t d], or [t b d] where only the first axis passes on in order.

    No shape tells these apart. What does is which outputs move when a part of one axis changes:
    time moves what comes later, and a batch moves nothing, or, by a fault, what comes before, too.
    """
    options = {"calls": None, "output": None, **found.options, "layout": "tbd"}
    swapped = replace(found, adapter=found.adapter or Adapter, options=options)
    swapped = replace(swapped, notes=(*found.notes, SWAPPED))
    try:
        first = _find_order(swapped.build(target), make_input(found.length))
        second = _find_order(found.build(target), make_input(found.length))
    except Exception:
        return found
    return swapped if first == "later" != second else found


SWAPPED = "takes time before batch ([t b d]), since only the first axis passes on what came before"


def _find_order(module: nn.Module, x: Tensor) -> str:
    """Return which outputs along the second axis a change moves: "none", "later" or "both"."""
    y = module(x)
    moved = [
        module(torch.cat([-x[:, :1], x[:, 1:]], 1)),
        module(torch.cat([x[:, :-1], -x[:, -1:]], 1)),
    ]
    later, earlier = (moved[0] - y)[:, 1:], (moved[1] - y)[:, :-1]
    bound = MOVES * y.abs().max()
    return (
        "both" if earlier.abs().max() > bound else "later" if later.abs().max() > bound else "none"
    )


MOVES = 1e-4
"""Share of the largest output by which another one must move to depend on an input."""


def _is_batch_second(target: Any) -> bool:
    """Whether batch_first is False in a module, or in the attention of torch's encoder."""
    if isinstance(target, nn.TransformerEncoder):
        target = target.layers[0]
    if isinstance(target, nn.TransformerEncoderLayer):
        target = target.self_attn
    return getattr(target, "batch_first", None) is False


@torch.no_grad()
def _try_way(
    target: Any, kind: Kind, options: dict[str, Any], note: str, x: Tensor, output: int | str | None
) -> Fit:
    """Return the fit of a kind, with the place of the sequence in what the module returned."""
    layout, length = options["layout"], x.shape[1]
    found = kind.adapter(target, **options).call(x)
    notes = (note,) if note else ()
    place = find_sequence(found, layout, (BATCH, length), output)
    if layout == "bdt":
        notes = (*notes, "takes features before time ([b d t])")
    if place is not None:
        name = type(found).__name__
        article = "an" if name[0] in "AEIOU" else "a"
        notes = (*notes, f"returns {article} {name}, of which {name_place(place)} is used")
    axes = get_item(found, place).ndim
    if axes != 3:
        notes = (*notes, f"returns {axes} axes, reshaped to [b t e]")
    plain = options == {"calls": None, "layout": "btd"} and place is None and axes == 3
    if plain and isinstance(target, nn.Module):
        return Fit(None, {}, 0, length, notes)
    return Fit(kind.adapter, {**options, "output": place}, 0, length, notes)


@torch.no_grad()
def _takes(module: nn.Module, make_input: InputMaker, length: int) -> bool:
    try:
        return module(make_input(length)).shape[:2] == (BATCH, length)
    except Exception:
        return False


def find_sequence(
    found: Any, layout: str, shape: tuple[int, int], output: int | str | None
) -> int | str | None:
    """Return the place of the first float tensor [b t …]; None if the tensor is not in a container.

    Args:
        found: what the module returned.
        layout: order of its axes.
        shape: b and t.
        output: the only place to look at, if not None.

    Raises:
        RefusalError: if there is no such tensor.
    """
    seen = []
    for place, value in list_items(found):
        if isinstance(value, Tensor):
            fits = value.ndim > 1 and lay_out(value, layout).shape[:2] == shape
            if fits and value.is_floating_point() and output in (None, place):
                return place
            size = f"{list(value.shape)}"
            bare = f"{size} {value.dtype}".replace("torch.", "")
            seen.append(bare if place is None else f"{name_place(place)} {size}")
        elif output == place and output is not None:
            seen.append(f"{name_place(place)} {type(value).__name__}")
    wanted = "no floats [b t …]" if output is None else f"no floats [b t …] as output {output}"
    raise RefusalError(f"returned {wanted}, only {', '.join(seen) or type(found).__name__}")


def list_items(found: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each place in what was returned and its content; the place of a bare tensor is None."""
    if isinstance(found, Tensor):
        yield None, found
    elif isinstance(found, Mapping):
        yield from found.items()
    elif isinstance(found, tuple | list):
        yield from enumerate(found)
    elif is_dataclass(found):
        yield from ((field.name, getattr(found, field.name)) for field in fields(found))
    else:
        yield from getattr(found, "__dict__", {}).items()


def name_place(place: Any) -> str:
    """Name a place in words."""
    return f"item {place}" if isinstance(place, int) else f"field {place}"


def find_decoder(target: Any, fit: Fit, make_input: InputMaker, relative: bool | None) -> Fit:
    """Return the fit of an adapter that decodes; without one, the same fit with a note why."""
    refused, x = "", make_input(fit.length)
    usual = {"output": None, "layout": "btd"}
    usual = {name: fit.options.get(name, value) for name, value in usual.items()}
    claim = {} if relative is None else {"relative": relative}
    ways = [(kind, *way) for kind in list_kinds(target) for way in kind.list_states(target)]
    for kind, way, note in ways:
        options = {"advances": kind.advances, "calls": kind.calls, **way, **claim, **usual}
        for placed in _list_placements(target, options, x):
            found = replace(fit, adapter=DecodingAdapter, options=placed)
            try:
                _check_decoding(found.build(target), x)
            except Exception as error:
                refused = refused or f"{note}, but {describe_refusal(error)}"
                continue
            return replace(found, notes=(*fit.notes, note))
    if fit.options.get("calls") is call_returned:
        name = fit.options["name"]
        raise RefusalError(f"it needs {name}, which was not found in what it returns")
    return replace(fit, notes=(*fit.notes, *filter(None, [refused])), undecoded=refused)


@torch.no_grad()
def _list_placements(target: Any, options: dict[str, Any], x: Tensor) -> Iterator[dict[str, Any]]:
    """Yield a decoder's options, once for every output that may be its state."""
    if "flag" not in options:
        yield options
        return
    if options["output"] is None:
        options = {**options, "output": 0}
    flag = {} if options["flag"] is None else {options["flag"]: True}
    adapter = DecodingAdapter(target, **options)
    try:
        found = target(adapter.lay_out(x), **make_state_argument(adapter, len(x)), **flag)
    except Exception:
        return
    for place, value in list_items(found):
        if value is not None and place not in (None, adapter.output):
            yield {**options, "place": place}


@torch.no_grad()
def _check_decoding(module: Any, x: Tensor) -> None:
    """Go on from a state, by several tokens and by one, and check the outputs' shapes.

    Raises:
        RefusalError: for no state, or outputs of another shape.
    """
    y, state = module.prefill(x)
    if state.held is None:
        raise RefusalError("gives no state")
    more, _ = module.prefill(x, state)
    # A method for one token must take the state that forward returns.
    begun = (module.start(len(x)), *([state] if module.advances is advance_steps else []))
    steps = [module.step(x[:, 0], before)[0][:, None] for before in begun]
    expected = module(x).shape
    single = (*expected[:1], 1, *expected[2:])
    for found, shape in ((y, expected), (more, expected), *((one, single) for one in steps)):
        if found.shape != shape:
            raise RefusalError(f"returned {list(found.shape)} instead of {list(shape)}")

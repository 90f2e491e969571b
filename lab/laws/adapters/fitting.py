"""Which of what a module returns is its output."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from inspect import Parameter, signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lab.laws.adapters.kinds import Kind, list_decoder_kinds
from lab.laws.adapters.plain import PlainAdapter, get_item, lay_out
from lab.laws.adapters.stateful import Returned
from lab.laws.verdict import RefusalError, describe_refusal


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
            seen.append(f"{name_place(place)} {list(value.shape)}" if place is not None else "")
            seen[-1] = seen[-1] or f"{list(value.shape)} {value.dtype}".replace("torch.", "")
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


def name_kind(found: Any) -> str:
    """Name the type of what was returned, with its article."""
    name = type(found).__name__
    return f"an {name}" if name[0] in "AEIOU" else f"a {name}"


LENGTHS = (5, 8, 16, 64, 128, 256)
BATCH = 2
TOKENS = 0
"""Stands for the width of tokens, which have none."""
InputMaker = Callable[[int], Tensor]
"""Length → an input of the length."""


class Fit(NamedTuple):
    """An adapter that takes a sequence, with the width and the length at which it did.

    `undecoded` says why the module's way of decoding could not be used; empty if it has none.
    """

    adapter: type[PlainAdapter] | None  # None: the module needs none
    options: dict[str, Any]
    width: int
    length: int
    notes: tuple[str, ...] = ()
    undecoded: str = ""

    def build(self, module: Any) -> nn.Module:
        """Build the adapter of a module."""
        return module if self.adapter is None else self.adapter(module, **self.options)

    def write_recipe(self) -> str:
        """Write the expression that makes the adapter from `module`."""
        return (
            "module" if self.adapter is None else write_recipe(self.adapter, "module", self.options)
        )


def find_fit(
    target: Any,
    kinds: list[Kind],
    widths: Sequence[int],
    build_input_maker: Callable[[int], InputMaker],
    output: int | str | None,
) -> Fit:
    """Return the first way of calling a module in which it takes a sequence and returns one.

    A way that takes a single length is the last resort. If such a way also takes another width, it
    is rejected: the length then stands where the module expects the width.

    Args:
        target: the module.
        kinds: adapters to try.
        widths: widths to try.
        make_give: returns the function that makes inputs of a width.
        output: which output is the sequence; None takes the first that fits.

    Raises:
        RefusalError: if there is none.
    """
    refusals, resort = [], None
    for length in LENGTHS:
        for width in widths:
            make_input = build_input_maker(width)
            for kind, layout in ((k, way) for k in kinds for way in k.layouts):
                try:
                    found = _try_kind(target, kind, layout, make_input, length, output)
                except Exception as error:
                    given = make_input(length)
                    # Tokens have no third axis to transpose.
                    shape = list((lay_out(given, layout) if given.ndim > 2 else given).shape)
                    words = f"given {shape}, it {describe_refusal(error)}"
                    # A wrong output is more informative than an error.
                    more = isinstance(error, RefusalError) and length == LENGTHS[0]
                    refusals.insert(0 if more else len(refusals), words)
                    continue
                found = found._replace(width=width)
                built = found.build(target)
                if any(_takes(built, make_input, t) for t in (length - 1, 2 * length)):
                    return found
                if width == TOKENS or not _takes(built, build_input_maker(width + 1), length):
                    resort = resort or found
    if resort is None:
        raise RefusalError([*refusals, "it takes a single length, but any width"][0])
    return resort


def find_decoder(target: Any, fit: Fit, make_input: InputMaker, relative: bool | None) -> Fit:
    """Return the fit of an adapter that decodes; without one, the same fit with a note why."""
    refused = ""
    options = {k: v for k, v in fit.options.items() if k in ("output", "layout")}
    for kind in list_decoder_kinds(target, relative):
        for placed in _list_placements(target, kind, options, make_input(fit.length)):
            found = fit._replace(adapter=kind.adapter, options=_drop_defaults(kind.adapter, placed))
            try:
                _check_decoding(found.build(target), make_input(fit.length))
            except Exception as error:
                refused = refused or f"{kind.note}, but {describe_refusal(error)}"
                continue
            return found._replace(notes=(*fit.notes, kind.note))
    if fit.adapter is Returned:
        raise RefusalError(
            f"it needs {fit.options['name']}, which was not found in what it returns"
        )
    return fit._replace(notes=(*fit.notes, *filter(None, [refused])), undecoded=refused)


def write_recipe(adapter: type[nn.Module], inner: str, options: dict[str, Any]) -> str:
    """Write the expression that makes an adapter of what the expression `inner` makes."""
    words = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"{adapter.__name__}({inner}, {words})" if words else f"{adapter.__name__}({inner})"


@torch.no_grad()
def _try_kind(
    target: Any,
    kind: Kind,
    layout: str,
    make_input: InputMaker,
    length: int,
    output: int | str | None,
) -> Fit:
    """Return the fit of a kind, with the place of the sequence in what the module returned."""
    options = {**kind.options, "layout": layout}
    adapter = kind.adapter(target, **_drop_defaults(kind.adapter, options))
    found = adapter.call(make_input(length))
    notes = (kind.note,) if kind.note else ()
    place = find_sequence(found, layout, (BATCH, length), output)
    if layout == "bdt":
        notes = (*notes, "takes features before time ([b d t])")
    if place is not None:
        notes = (*notes, f"returns {name_kind(found)}, of which {name_place(place)} is used")
    axes = get_item(found, place).ndim
    if axes != 3:
        notes = (*notes, f"returns {axes} axes, reshaped to [b t e]")
    bare = kind.adapter is PlainAdapter and layout == "btd" and place is None and axes == 3
    if bare and isinstance(target, nn.Module):
        return Fit(None, {}, 0, length, notes)
    options = _drop_defaults(kind.adapter, {**options, "output": place})
    return Fit(kind.adapter, options, 0, length, notes)


@torch.no_grad()
def _takes(module: nn.Module, make_input: InputMaker, length: int) -> bool:
    try:
        return module(make_input(length)).shape[:2] == (BATCH, length)
    except Exception:
        return False


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
    one, _ = module.step(x[:, 0], module.start(len(x)))
    expected = module(x).shape
    for found, shape in (
        (y, expected),
        (more, expected),
        (one[:, None], (*expected[:1], 1, *expected[2:])),
    ):
        if found.shape != shape:
            raise RefusalError(f"returned {list(found.shape)} instead of {list(shape)}")


def _list_placements(
    target: Any, kind: Kind, options: dict[str, Any], x: Tensor
) -> Iterator[dict[str, Any]]:
    """Yield a decoder's options, once for every output that may be its state."""
    options = {**options, **kind.options}
    if kind.adapter is not Returned:
        yield options
        return
    flag = {} if options["flag"] is None else {options["flag"]: True}
    adapter = Returned(target, **_drop_defaults(Returned, options))
    with torch.no_grad():
        try:
            found = target(
                lay_out(x, adapter.layout), **adapter.make_state_argument(len(x)), **flag
            )
        except Exception:
            return
    for place, value in list_items(found):
        if value is not None and place not in (None, adapter.output):
            yield {**options, "place": place}


def _drop_defaults(adapter: type[nn.Module], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that an adapter takes, without those equal to its defaults."""
    asked = signature(adapter.__init__).parameters
    return {
        name: options[name]
        for name, parameter in asked.items()
        if name in options
        and (parameter.default is Parameter.empty or parameter.default != options[name])
    }

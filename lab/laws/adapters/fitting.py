"""Trying adapters on a module: which takes a sequence and gives one back."""

from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter, signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lab.laws.adapters.kinds import Kind, decoder_kinds
from lab.laws.adapters.plain import Plain, item, laid
from lab.laws.adapters.returned import items, kind_of, named, sequence_in
from lab.laws.adapters.stateful import Returned
from lab.laws.refusal import REFUSALS, RefusalError, raised

LENGTHS = (5, 8, 16, 64, 128, 256)
BATCH = 2
TOKENS = 0  # the width of what has none
Give = Callable[[int], Tensor]
"""Length → an input of the length."""


class Fit(NamedTuple):
    """An adapter that takes a sequence, and the length and the shape that it was seen with."""

    adapter: type[Plain] | None  # None: the module needs none
    options: dict[str, Any]
    width: int
    length: int
    notes: tuple[str, ...] = ()

    def made(self, module: Any) -> nn.Module:
        """Return the adapter of a module."""
        return module if self.adapter is None else self.adapter(module, **self.options)

    def recipe(self) -> str:
        """Return the expression that makes the adapter from `module`."""
        return "module" if self.adapter is None else recipe(self.adapter, "module", self.options)


def fitted(
    target: Any,
    kinds: list[Kind],
    widths: Sequence[int],
    giving: Callable[[int], Give],
    output: int | str | None,
) -> Fit:
    """Return the first way in which a module takes a sequence and gives one, shortest first.

    A way that takes one length alone is the last resort. Taking another width as well, it is none:
    the length stands where the module wants the width.

    Args:
        widths: to try.
        giving: makes inputs of a width.

    Raises:
        RefusalError: if there is none.
    """
    refusals, resort = [], None
    for length in LENGTHS:
        for width in widths:
            give = giving(width)
            for kind, layout in ((k, way) for k in kinds for way in k.layouts):
                try:
                    found = _seen(target, kind, layout, give, length, output)
                except REFUSALS as error:
                    given = give(length)
                    # Tokens have no third axis to lay.
                    shape = list((laid(given, layout) if given.ndim > 2 else given).shape)
                    words = f"given {shape}, it {raised(error)}"
                    # What came back says more than why nothing did.
                    more = isinstance(error, RefusalError) and length == LENGTHS[0]
                    refusals.insert(0 if more else len(refusals), words)
                    continue
                found = found._replace(width=width)
                made = found.made(target)
                if any(_takes(made, give, t) for t in (length - 1, 2 * length)):
                    return found
                if width == TOKENS or not _takes(made, giving(width + 1), length):
                    resort = resort or found
    if resort is None:
        raise RefusalError([*refusals, "it takes one length alone, of any width"][0])
    return resort


def decoding(target: Any, fit: Fit, give: Give, relative: bool | None) -> Fit:
    """Return the fit of a decoder of the module, or the fit as it was, and why in its notes."""
    refused = ()
    options = {k: v for k, v in fit.options.items() if k in ("output", "layout")}
    for kind in decoder_kinds(target, relative):
        for placed in _placed(target, kind, options, give(fit.length)):
            found = fit._replace(adapter=kind.adapter, options=_spare(kind.adapter, placed))
            try:
                _decode(found.made(target), give(fit.length))
            except REFUSALS as error:
                refused = refused or (f"no decoder: it {kind.note}, but {raised(error)}",)
                continue
            return found._replace(notes=(*fit.notes, kind.note))
    if fit.adapter is Returned:
        raise RefusalError(f"wants {fit.options['name']}, and what it returns for it is not found")
    return fit._replace(notes=(*fit.notes, *refused))


def recipe(adapter: type[nn.Module], inner: str, options: dict[str, Any]) -> str:
    """Return the expression that makes an adapter of what another expression makes."""
    words = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"{adapter.__name__}({inner}, {words})" if words else f"{adapter.__name__}({inner})"


@torch.no_grad()
def _seen(
    target: Any, kind: Kind, layout: str, give: Give, length: int, output: int | str | None
) -> Fit:
    """Return the fit of a kind, with the place of the sequence in what it returned."""
    options = {**kind.options, "layout": layout}
    adapter = kind.adapter(target, **_spare(kind.adapter, options))
    found = adapter.called(give(length))
    notes = (kind.note,) if kind.note else ()
    place = sequence_in(found, layout, (BATCH, length), output)
    if layout == "bdt":
        notes = (*notes, "features before time ([b d t])")
    if place is not None:
        notes = (*notes, f"returns {kind_of(found)}: {named(place)} is taken")
    axes = item(found, place).ndim
    if axes != 3:
        notes = (*notes, f"returns {axes} axes: made [b t e]")
    bare = kind.adapter is Plain and layout == "btd" and place is None and axes == 3
    if bare and isinstance(target, nn.Module):
        return Fit(None, {}, 0, length, notes)
    options = _spare(kind.adapter, {**options, "output": place})
    return Fit(kind.adapter, options, 0, length, notes)


@torch.no_grad()
def _takes(module: nn.Module, give: Give, length: int) -> bool:
    try:
        return module(give(length)).shape[:2] == (BATCH, length)
    except REFUSALS:
        return False


@torch.no_grad()
def _decode(module: Any, x: Tensor) -> None:
    """Go on from a state, by several tokens and by one, and see that outputs come."""
    y, state = module.prefill(x)
    if state.held is None:
        raise RefusalError("gives no state")
    further, _ = module.prefill(x, state)
    one, _ = module.step(x[:, 0], module.start(len(x)))
    asked = module(x).shape
    for found, shape in (
        (y, asked),
        (further, asked),
        (one[:, None], (*asked[:1], 1, *asked[2:])),
    ):
        if found.shape != shape:
            raise RefusalError(f"returned {list(found.shape)} where {list(shape)} was to come")


def _placed(
    target: Any, kind: Kind, options: dict[str, Any], x: Tensor
) -> Iterator[dict[str, Any]]:
    """Yield a decoder's options, with every place where its state may be."""
    options = {**options, **kind.options}
    if kind.adapter is not Returned:
        yield options
        return
    flag = {} if options["flag"] is None else {options["flag"]: True}
    adapter = Returned(target, **_spare(Returned, options))
    with torch.no_grad():
        try:
            found = target(laid(x, adapter.layout), **adapter.begun(len(x)), **flag)
        except REFUSALS:
            return
    for place, value in items(found):
        if value is not None and place not in (None, adapter.output):
            yield {**options, "place": place}


def _spare(adapter: type[nn.Module], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that an adapter takes, without those it has of itself."""
    asked = signature(adapter.__init__).parameters
    return {
        name: options[name]
        for name, parameter in asked.items()
        if name in options
        and (parameter.default is Parameter.empty or parameter.default != options[name])
    }

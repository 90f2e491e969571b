"""Adapters: how foreign modules of each kind are called, as modules from [b t d] to [b t e].

An `Adapter` holds a foreign module as `module` and calls it by a function; a `DecodingAdapter` has
another function that goes on from a state, too. `KINDS` is the table of both for each kind of
module, and `lab.laws.adaptation.adapt` finds by trying which row a module needs. Where none fits,
write an adapter: any nn.Module whose forward maps [b t d] to [b t e], with start, prefill and step
if it decodes. It may have two more attributes: `relative`, whether only differences of positions
count, and `paddings`, the patterns of padding that it supports, of "left", "right" and "scattered".
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from inspect import Parameter, signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

PATTERNS = ("left", "right", "scattered")
"""Where padding may stand; a decoder without the attribute `paddings` supports all patterns."""


class Carried(NamedTuple):
    """The state of a foreign module, and how much it has read.

    Attributes:
        position: tokens of each row without padding [b].
        keep: False for padding among all s tokens given so far [b s].
        held: the module's own state; None before the first token.
        tensors: the tensors within `held`.
    """

    position: Tensor
    keep: Tensor
    held: Any = None
    tensors: tuple[Tensor, ...] = ()


class Adapter(nn.Module):
    """A foreign module or function, called as one from [b t d] to [b t e].

    Args:
        module: the foreign module or function.
        calls: (adapter, x) → what the module returns.
        output: which item of a tuple, or field of an object, is the sequence; None for a tensor.
        layout: order of its axes, in and out: "btd", "tbd" or "bdt".
        options: what `calls` reads from the adapter's `options`.
    """

    def __init__(
        self,
        module: Any,
        calls: Callable[..., Any] | None = None,
        output: int | str | None = None,
        layout: str = "btd",
        **options: Any,
    ):
        super().__init__()
        self.module, self.calls = module, calls
        self.output, self.layout, self.options = output, layout, options
        self.training = getattr(module, "training", True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence [b t e]."""
        return self.take_sequence(self.call(x))

    def call(self, x: Tensor) -> Any:
        """Return what the foreign module returns."""
        return self.module(self.lay_out(x)) if self.calls is None else self.calls(self, x)

    def lay_out(self, x: Tensor) -> Tensor:
        """Return x [b t …] in the module's layout, or x in that layout as [b t …]."""
        return lay_out(x, self.layout)

    def take_sequence(self, found: Any) -> Tensor:
        """Return the sequence [b t e] among what the foreign module returned."""
        y = self.lay_out(get_item(found, self.output))
        return y.reshape(*y.shape[:2], -1)

    def list_sources(self) -> list[Any]:
        """List the class and the functions that a program needs to make this adapter."""
        return [type(self), *filter(None, [self.calls])]


class DecodingAdapter(Adapter):
    """An adapter that goes on from a state.

    Args:
        module: the foreign module.
        advances: (adapter, x, held, state, keep) → outputs of further tokens, and the module's own
            state after them; `held` is the one before, None at first, in `state`.
        calls: (adapter, x) → what the module returns.
        relative: whether only differences of positions count; None makes no claim.
        positioned: whether the module can be told the first position.
        paddings: the patterns of padding that it can leave out.
        output: as of `Adapter`, and so are `layout` and `options`.
    """

    def __init__(
        self,
        module: Any,
        advances: Callable[..., Any],
        calls: Callable[..., Any] | None = None,
        relative: bool | None = None,
        positioned: bool = False,
        paddings: tuple[str, ...] = (),
        output: int | str | None = None,
        layout: str = "btd",
        **options: Any,
    ):
        super().__init__(module, calls, output, layout, **options)
        self.advances, self.positioned, self.paddings = advances, positioned, paddings
        if relative is not None:
            self.relative = relative

    def start(self, batch: int, position: int = 0) -> Carried:
        """Return the state before the first token.

        Raises:
            ValueError: for a position other than 0, which the module cannot be told.
        """
        if position and not self.positioned:
            raise ValueError(f"{position=} must be 0: this module takes no first position")
        device = next(self.module.parameters(), torch.zeros(0)).device
        nothing = torch.zeros(batch, 0, dtype=torch.bool, device=device)
        return Carried(torch.full((batch,), position, device=device), nothing)

    def prefill(
        self, x: Tensor, state: Carried | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Carried]:
        """Return the outputs of further tokens, and the state after them.

        Raises:
            ValueError: if `keep` has padding, and the module cannot leave out any.
        """
        before = self.start(len(x)) if state is None else state
        kept = keep_all(x, keep)
        if not self.paddings and not kept.all():
            raise ValueError("keep has padding, but this module takes no padding mask")
        y, held = self.advances(self, x, before.held, state, keep)
        position, seen = before.position + kept.sum(1), torch.cat([before.keep, kept], dim=1)
        return y, Carried(position, seen, held, tuple(list_tensors(held)))

    def step(self, x: Tensor, state: Carried) -> tuple[Tensor, Carried]:
        """Return the output of one further token, and the state after it."""
        y, state = self.prefill(x[:, None], state)
        return y[:, 0], state

    def list_sources(self) -> list[Any]:
        """List the class and the functions that a program needs to make this adapter."""
        return [*super().list_sources(), self.advances]


def lay_out(x: Tensor, layout: str) -> Tensor:
    """Return x [b t …] in a layout, or x in that layout as [b t …]."""
    if layout == "tbd":
        return x.transpose(0, 1)
    return x.transpose(1, 2) if layout == "bdt" else x


def get_item(found: Any, output: int | str | None) -> Any:
    """Return an item of a tuple, an entry of a dict or a field of an object; None: all of it.

    A module may return a tensor alone where it is not asked for its state.
    """
    if output is None or isinstance(found, Tensor):
        return found
    if isinstance(output, int) or isinstance(found, Mapping):
        return found[output]
    return getattr(found, output)


def keep_all(x: Tensor, keep: Tensor | None) -> Tensor:
    """Return the mask `keep` [b t], or one that keeps every token of x [b t …]."""
    return x.new_ones(x.shape[:2], dtype=torch.bool) if keep is None else keep


def list_tensors(held: Any) -> list[Tensor]:
    """List the tensors in containers, and in objects' fields, at any depth."""
    found, waiting, seen = [], [held], set()
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
        elif not callable(one):
            waiting += getattr(one, "__dict__", {}).values()
    return found


def copy_state(held: Any) -> Any:
    """Return a copy whose tensors are clones, through which gradients reach the originals."""
    return deepcopy(held, {id(x): x.clone() for x in list_tensors(held)})


def lend_state(held: Any, name: str = "state") -> Any:
    """Return what a call is given of a state: a cache's copy, and any other state itself.

    A call must leave a state as it is: tensors, or tuples and lists of them. By design a call may
    write into a cache: a dict, an object of another class, or what the parameter's name calls so.
    """
    return copy_state(held) if "cache" in name or not _is_plain(held) else held


def _is_plain(held: Any) -> bool:
    if isinstance(held, tuple | list):
        return all(map(_is_plain, held))
    return held is None or isinstance(held, Tensor | int | float)


def _take_each(x: Tensor, held: Any, step: Callable[..., Any], timed: bool) -> tuple[Tensor, Any]:
    """Return the outputs of token after token; `timed`: each has an axis of one for the time."""
    outputs = []
    for i in range(x.shape[1]):
        y, held = step(x[:, i : i + 1] if timed else x[:, i], held)
        outputs.append(y)
    return (torch.cat if timed else torch.stack)(outputs, 1), held


Way = tuple[dict[str, Any], str]
"""Options of an adapter, and what to say of the module."""

POSITIONS = (
    *("position_ids", "positions", "position", "pos", "pos_ids", "input_pos", "input_positions"),
    "token_positions",
)
STATES = (
    *("state", "states", "hidden", "h", "hx", "h0", "h_0", "cache", "kv_cache", "past", "past_kv"),
    *("past_state", "past_key_value", "past_key_values", "layer_past", "cache_params"),
    *("prev_state", "previous_state", "initial_state", "init_state", "recurrent_state", "carry"),
)
FLAGS = ("use_cache", "return_state", "output_final_state", "return_cache")
"""Parameters that must be True for a state to be returned."""
INITIAL = (
    *("initial_state", "init_state", "default_state", "init_hidden", "get_initial_state"),
    *("zero_state", "start"),
)
"""Methods that make the state of `batch` rows before any token."""
CACHES = ("cache", "past_key_values", "cache_params", "state")
"""What models of transformers call their parameter for a cache, and the field that returns it.

In transformers 5.24 it is "cache"; before, "past_key_values", and in Mamba "cache_params".
"""
ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose angles depend on the position only."""


def get_parameters(target: Any) -> dict[str, Parameter]:
    """Return the parameters of a module's forward, or of a function, except the first."""
    try:
        found = signature(target.forward if isinstance(target, nn.Module) else target).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return {}
    return dict(list(found.items())[1:])


def _is_required(target: Any, name: str) -> bool:
    parameter = get_parameters(target).get(name)
    return parameter is not None and parameter.default is Parameter.empty


def _find_methods(target: Any, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if callable(getattr(target, name, None))]


# Models of transformers: from tokens [b t], or from embeddings where `given` is "inputs_embeds".


def is_hugging_face(target: Any) -> bool:
    """Whether a module is a model of transformers; does not import that library."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(target, library.PreTrainedModel)


def call_model(adapter: Adapter, x: Tensor) -> Any:
    """Return a model's output object, without a cache."""
    uncached = {"use_cache": False} if "use_cache" in get_all_parameters(adapter.module) else {}
    return adapter.module(**{adapter.options["given"]: x}, **uncached)


def get_all_parameters(module: nn.Module) -> Mapping[str, Parameter]:
    """Return the parameters of a module's forward."""
    return signature(module.forward).parameters


def advance_cache(
    adapter: Any, x: Tensor, held: Any, state: Carried | None, keep: Tensor | None
) -> tuple[Tensor, Any]:
    """Go on from the cache that a model returns.

    Padding is left out by `attention_mask`, and counts no position if the model takes
    `position_ids`. The library supports padding on the left for decoders.
    """
    cache, options = adapter.options["cache"], {}
    before, kept = adapter.start(len(x)) if state is None else state, keep_all(x, keep)
    if held is not None:
        options[cache] = copy_state(held)
    mask = torch.cat([before.keep, kept], dim=1)
    if not mask.all():
        # A recurrent model, whose cache has no keys, takes the mask of the new tokens only.
        seen = kept if all(getattr(held, "is_linear", ())) else mask
        options["attention_mask"] = seen.long()
    if adapter.positioned and not (state is None and keep is None):
        counted = (kept.cumsum(1) - 1).clamp(min=0)
        options["position_ids"] = before.position[:, None] + counted
    found = adapter.module(**{adapter.options["given"]: x}, use_cache=True, **options)
    return adapter.take_sequence(found), found[cache]


def list_model_calls(target: Any) -> Iterator[Way]:
    """Yield how a model of transformers is called."""
    yield {"given": "input_ids", "layouts": ("btd",)}, ""


def list_caches(target: Any, given: str = "input_ids") -> Iterator[Way]:
    """Yield how a model of transformers goes on, if it takes a cache."""
    parameters = get_all_parameters(target)
    cache = next((name for name in CACHES if name in parameters), None)
    if cache is not None:
        positioned = "position_ids" in parameters
        # RWKV, the only model with a cache of the name "state", warns that it ignores the mask.
        paddings = () if cache == "state" else ("left",)
        options = {"cache": cache, "given": given, "positioned": positioned, "paddings": paddings}
        if (
            relative := _knows_differences_only(getattr(target, "config", None), positioned)
        ) is not None:
            options["relative"] = relative
        yield options, f"decodes with {cache}"


def _knows_differences_only(config: Any, takes_positions: bool) -> bool | None:
    """Whether a model depends on differences of positions only; None where that is unknown.

    It does with rotations by angles that depend on the position only, but not with rotations that
    change with the length read, nor with tables of positions.
    """
    if not takes_positions:
        return None
    rotation = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if rotation is None:
        return getattr(config, "rope_theta", None) is not None
    each = [p for p in rotation.values() if isinstance(p, dict)] or [rotation]
    types = {p.get("rope_type", p.get("type", "default")) for p in each}
    return types <= set(ROTATIONS)


class HuggingFaceLayer(Adapter):
    """An attention or a block of a model of transformers, given what the model would give it.

    Args:
        module: the layer.
        masked: whether it takes a causal mask [1 1 t s], to be added to its scores.
        rotated: whether it takes rotations of its positions; they are computed by the
            RotaryEmbedding class in its own module, from its configuration.
        options: as of `Adapter`.
    """

    def __init__(
        self, module: nn.Module, masked: bool = True, rotated: bool = True, **options: Any
    ):
        super().__init__(module, **options)
        self.masked, self.rotary = masked, None
        if rotated:
            beside = vars(sys.modules[type(module).__module__])
            rotary = next(cls for name, cls in beside.items() if name.endswith("RotaryEmbedding"))
            config = next(m.config for m in module.modules() if hasattr(m, "config"))
            self.rotary = rotary(config=config)

    def call(self, x: Tensor) -> Any:
        """Return what the layer returns at positions 0, 1, 2 …"""
        return self.module(x, **self.build_context(x))

    def build_context(self, x: Tensor) -> dict[str, Tensor]:
        """Return what its model would give the layer beside an input [b t d]."""
        t, options = x.shape[1], {}
        if self.rotary is not None:
            positions = torch.arange(t, device=x.device)[None]
            options["position_embeddings"] = self.rotary(x, positions)
        if self.masked:
            least = torch.finfo(x.dtype).min
            mask = torch.full((1, 1, t, t), least, dtype=x.dtype, device=x.device)
            options["attention_mask"] = mask.triu(1)
        return options


def list_layer_calls(target: Any) -> Iterator[Way]:
    """Yield how a layer of a model of transformers is called."""
    parameters = get_parameters(target)
    if "attention_mask" in parameters and type(target).__module__.startswith("transformers."):
        names = vars(sys.modules[type(target).__module__])
        configured = any(hasattr(part, "config") for part in target.modules())
        known = configured and any(name.endswith("RotaryEmbedding") for name in names)
        rotated = "position_embeddings" in parameters and known
        words = "given a causal mask" + " and the rotations of its configuration" * rotated
        yield {"rotated": rotated, "layouts": ("btd",)}, words


# Modules of torch.


def is_attention(target: Any) -> bool:
    """Whether a module is an attention or an encoder of torch, which take a mask."""
    kinds = nn.MultiheadAttention | nn.TransformerEncoderLayer | nn.TransformerEncoder
    return isinstance(target, kinds)


def call_masked(adapter: Adapter, x: Tensor) -> Any:
    """Return self-attention under a causal mask.

    Causality is requested twice: by the mask [t s], True where s is later than t, and by
    `is_causal`, which allows a kernel that does not read the mask.
    """
    given, t = adapter.lay_out(x), x.shape[1]
    mask = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
    if isinstance(adapter.module, nn.MultiheadAttention):
        options = {"attn_mask": mask, "is_causal": True, "need_weights": False}
        return adapter.module(given, given, given, **options)
    return adapter.module(given, mask, is_causal=True)


def list_masked_calls(target: Any) -> Iterator[Way]:
    """Yield how an attention of torch is called."""
    yield {}, "called with a causal mask and is_causal=True"


def is_recurrent(target: Any) -> bool:
    """Whether a module is torch's RNN, GRU or LSTM."""
    return isinstance(target, nn.RNNBase)


def advance_recurrent(adapter: Any, x: Tensor, held: Any, *_: Any) -> tuple[Tensor, Any]:
    """Go on from the states [layers b h] of torch's recurrences, kept as tuples of [b layers h]."""
    hidden = None
    if held is not None:
        hidden = tuple(h.transpose(0, 1).contiguous() for h in held)
        hidden = hidden if isinstance(adapter.module, nn.LSTM) else hidden[0]
    y, hidden = adapter.module(adapter.lay_out(x), hidden)
    hidden = hidden if isinstance(hidden, tuple) else (hidden,)
    return adapter.lay_out(y), tuple(h.transpose(0, 1) for h in hidden)


def list_hidden_states(target: Any) -> Iterator[Way]:
    """Yield how torch's recurrences of one direction go on: they read no positions."""
    if not target.bidirectional:
        yield {"relative": True, "positioned": True}, "decodes with its hidden state"


# Modules that ask for their positions or for a state, or have a method for one token.


def call_positioned(adapter: Adapter, x: Tensor) -> Any:
    """Give a module the positions of its tokens, 0, 1, 2 …: [t], or [b t] if `batched`."""
    positions = torch.arange(x.shape[1], device=x.device)
    if adapter.options["batched"]:
        positions = positions.expand(x.shape[0], -1)
    return adapter.module(adapter.lay_out(x), **{adapter.options["name"]: positions})


def list_positions(target: Any) -> Iterator[Way]:
    """Yield how positions may be given where a parameter for them is required."""
    for name in POSITIONS:
        if _is_required(target, name):
            for batched in (False, True):
                shape = "[b t]" if batched else "[t]"
                yield {"name": name, "batched": batched}, f"positions {shape} given as {name}"


def call_returned(adapter: Adapter, x: Tensor) -> Any:
    """Return what a module returns without an earlier state."""
    return adapter.module(adapter.lay_out(x), **make_state_argument(adapter, len(x)))


def advance_returned(adapter: Any, x: Tensor, held: Any, *_: Any) -> tuple[Tensor, Any]:
    """Go on with forward(x, name=state) → outputs and, at `place`, the state after them."""
    name, place, flag = (adapter.options[key] for key in ("name", "place", "flag"))
    held = lend_state(held, name or "state")
    options = make_state_argument(adapter, len(x)) if held is None else {name: held}
    if flag is not None:
        options[flag] = True
    found = adapter.module(adapter.lay_out(x), **options)
    return adapter.take_sequence(found), get_item(found, place)


def make_state_argument(adapter: Adapter, batch: int) -> dict[str, Any]:
    """Return the argument for the state before any token, if one is needed."""
    name, initial = adapter.options["name"], adapter.options["initial"]
    if name is None:
        return {}
    if initial is not None:
        return {name: copy_state(getattr(adapter.module, initial)(batch))}
    module = adapter.module
    parameters = signature(module.forward if isinstance(module, nn.Module) else module).parameters
    return {name: None} if parameters[name].default is Parameter.empty else {}


def list_required_states(target: Any) -> Iterator[Way]:
    """Yield how a first state may be given where a parameter for it is required."""
    for name in STATES:
        if _is_required(target, name):
            for initial in (*_find_methods(target, INITIAL), None):
                yield {"name": name, "initial": initial}, ""


def list_returned_states(target: Any) -> Iterator[Way]:
    """Yield how a module that takes a state may return it."""
    parameters = get_parameters(target)
    flag = next((flag for flag in FLAGS if flag in parameters), None)
    for name in STATES:
        if name in parameters:
            methods = _find_methods(target, INITIAL) if _is_required(target, name) else ()
            for initial in (*methods, None):
                words = f"decodes with the {name} that it returns"
                yield {"name": name, "flag": flag, "initial": initial}, words


def advance_allocated(adapter: Any, x: Tensor, held: Any, *_: Any) -> tuple[Tensor, Any]:
    """Go on as mamba-ssm does: allocate_inference_cache, and step(x [b 1 d], *state) → (y, *state).

    The first tokens are read at once where forward takes `inference_params` and the mixer has a
    `layer_idx`, under which it stores its state; tokens after a state are read by step only. Its
    step writes into the state by design. `timed`: step takes [b 1 d] and returns [b 1 e].

    Source: state-spaces/mamba, mamba_ssm/modules and mamba_ssm/utils/generation.py.
    """
    module = adapter.module

    def step(token: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, *after = module.step(token, *state)
        return y, tuple(after)

    if held is None:
        # The state has a fixed size, so the maximum length asked for does not matter.
        held = module.allocate_inference_cache(len(x), 1, dtype=x.dtype)
        layer = getattr(module, "layer_idx", None)
        if layer is not None and "inference_params" in signature(module.forward).parameters:
            memory = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={layer: held})
            return adapter.take_sequence(module(x, inference_params=memory)), held
    else:
        held = copy_state(held)
    return _take_each(x, held, step, adapter.options["timed"])


def list_allocations(target: Any) -> Iterator[Way]:
    """Yield how a mixer of mamba-ssm goes on."""
    if _find_methods(target, ("step", "allocate_inference_cache"))[1:]:
        for timed in (True, False):
            yield {"timed": timed}, "decodes with allocate_inference_cache and step"


def advance_steps(adapter: Any, x: Tensor, held: Any, *_: Any) -> tuple[Tensor, Any]:
    """Go on with step(x [b d], state) → (y [b e], state); [b 1 d] and [b 1 e] if `timed`.

    Where forward returns the state, at `place`, it reads the first tokens; where it takes one, as
    `name`, it also reads several tokens after a state. What is left is read by step.
    """
    name, place, initial = (adapter.options.get(key) for key in ("name", "place", "initial"))
    several = x.shape[1] > 1
    by_step = not several or name is None if held is not None else initial and not several
    if place is not None and not by_step:
        return advance_returned(adapter, x, held)
    held = lend_state(held)
    if held is None and initial is not None:
        held = copy_state(getattr(adapter.module, initial)(len(x)))
    return _take_each(x, held, adapter.module.step, adapter.options["timed"])


def list_steps(target: Any) -> Iterator[Way]:
    """Yield how a module with a method for one token may go on, the most complete way first."""
    if not _find_methods(target, ("step",)):
        return
    parameters, initials = get_parameters(target), (*_find_methods(target, INITIAL), None)
    flag = next((flag for flag in FLAGS if flag in parameters), None)
    names = (*(name for name in STATES if name in parameters), None)
    for name in names:
        for initial in initials:
            for timed in (False, True):
                note = "decodes with step and the state that forward returns"
                note += f", or takes as {name}" if name else ""
                yield {"name": name, "flag": flag, "initial": initial, "timed": timed}, note
    for initial in initials:
        for timed in (False, True):
            note = f"decodes with {initial} and step" if initial else "decodes with step, from None"
            yield {"initial": initial, "timed": timed}, note


def list_once(target: Any) -> Iterator[Way]:
    """Yield one way, without options."""
    yield {}, ""


def list_none(target: Any) -> Iterator[Way]:
    """Yield no way."""
    yield from ()


class Kind(NamedTuple):
    """A kind of module, a row of `KINDS`.

    Attributes:
        owns: target → whether it is such a module, and then no later row is tried; None: the row
            yields no way for other modules, and later rows are tried, too.
        calls: how it is called, as for `Adapter`; None: with the sequence alone.
        list_calls: target → the ways to call it.
        advances: how it goes on from a state, as for `DecodingAdapter`; None if it cannot.
        list_states: target → the ways to go on from a state.
        adapter: the class of the adapter that only calls it.
    """

    owns: Callable[[Any], bool] | None
    calls: Callable[..., Any] | None
    list_calls: Callable[[Any], Iterator[Way]] = list_once
    advances: Callable[..., Any] | None = None
    list_states: Callable[[Any], Iterator[Way]] = list_none
    adapter: type[Adapter] = Adapter


KINDS = (
    # is it such a module    how is it called                   how does it go on from a state
    Kind(is_hugging_face, call_model, list_model_calls, advance_cache, list_caches),
    Kind(is_attention, call_masked, list_masked_calls),
    Kind(is_recurrent, None, list_once, advance_recurrent, list_hidden_states),
    Kind(None, None, list_layer_calls, adapter=HuggingFaceLayer),
    Kind(None, call_positioned, list_positions),
    Kind(None, None, list_none, advance_allocated, list_allocations),
    Kind(None, None, list_none, advance_steps, list_steps),
    Kind(None, call_returned, list_required_states, advance_returned, list_returned_states),
    Kind(None, None),
)
"""The kinds of modules, the likeliest first."""


def list_kinds(target: Any) -> Iterator[Kind]:
    """Yield the kinds that a module may be of, the likeliest first."""
    for kind in KINDS:
        if kind.owns is None:
            yield kind
        elif kind.owns(target):
            yield kind
            return

"""Which adapters may fit a module, judged by its class and the parameters of its forward."""

import sys
from collections.abc import Iterator
from inspect import Parameter, signature
from typing import Any, NamedTuple

from torch import nn

from lab.laws.adapters.libraries import (
    HuggingFace,
    HuggingFaceDecoder,
    HuggingFaceLayer,
    Masked,
    TorchRecurrent,
    find_cache_name,
)
from lab.laws.adapters.plain import PlainAdapter, Positioned
from lab.laws.adapters.stateful import Allocated, Returned, Stepping

POSITIONS = (
    "position_ids",
    "positions",
    "position",
    "pos",
    "pos_ids",
    "input_pos",
    "input_positions",
    "token_positions",
)
STATES = (
    "state",
    "states",
    "hidden",
    "h",
    "hx",
    "h0",
    "h_0",
    "cache",
    "kv_cache",
    "past",
    "past_kv",
    "past_state",
    "past_key_value",
    "past_key_values",
    "layer_past",
    "cache_params",
    "prev_state",
    "previous_state",
    "initial_state",
    "init_state",
    "recurrent_state",
    "carry",
)
FLAGS = ("use_cache", "return_state", "output_final_state", "return_cache")
INITIAL = (
    "initial_state",
    "init_state",
    "default_state",
    "init_hidden",
    "get_initial_state",
    "zero_state",
    "start",
)
ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose angles depend on the position only."""


class Kind(NamedTuple):
    """An adapter that may fit a module, with its options and the layouts to try."""

    adapter: type[PlainAdapter]
    options: dict[str, Any]
    layouts: tuple[str, ...] = ("btd",)
    note: str = ""


def list_forward_kinds(target: Any, layout: str | None) -> list[Kind]:
    """List the ways of calling a module on a sequence, the likeliest first."""
    if is_hugging_face(target):
        return [Kind(HuggingFace, {})]
    recognised = ("tbd",) if layout is None and _is_batch_second(target) else None
    layouts = recognised or ((layout,) if layout else ("btd", "bdt"))
    said = "takes time before batch ([t b d]), since its batch_first is False" if recognised else ""
    if isinstance(
        target, nn.MultiheadAttention | nn.TransformerEncoderLayer | nn.TransformerEncoder
    ):
        causal = "called with a causal mask and is_causal=True"
        return [Kind(Masked, {}, layouts[:1], f"{said}; {causal}" if said else causal)]
    if isinstance(target, nn.RNNBase):
        return [Kind(PlainAdapter, {}, layouts[:1], said)]
    parameters = _get_parameters(target)
    kinds = []
    if "attention_mask" in parameters and type(target).__module__.startswith("transformers."):
        rotated = "position_embeddings" in parameters and _has_rotary(target)
        words = "given a causal mask" + " and the rotations of its configuration" * rotated
        kinds.append(Kind(HuggingFaceLayer, {"rotated": rotated}, ("btd",), words))
    for name in POSITIONS:
        if _is_required(parameters.get(name)):
            said_too = f"{said}; " if said else ""
            for batched in (False, True):
                shape = "[b t]" if batched else "[t]"
                options = {"name": name, "batched": batched}
                words = f"{said_too}positions {shape} given as {name}"
                kinds.append(Kind(Positioned, options, layouts, words))
    for name in STATES:
        if _is_required(parameters.get(name)):
            for initial in (*_find_methods(target, INITIAL), None):
                kinds.append(Kind(Returned, {"name": name, "initial": initial}, layouts, said))
    return [*kinds, Kind(PlainAdapter, {}, layouts, said)]


def list_decoder_kinds(target: Any, relative: bool | None) -> Iterator[Kind]:
    """Yield the ways in which a module may go on from a state, the likeliest first."""
    claim = {} if relative is None else {"relative": relative}
    parameters = _get_parameters(target)
    if is_hugging_face(target):
        if relative is None:
            known = knows_differences_only(target.config, "position_ids" in parameters)
            claim = {} if known is None else {"relative": known}
        if cache := find_cache_name(target):
            yield Kind(HuggingFaceDecoder, claim, note=f"decodes with {cache}")
        return
    if isinstance(target, nn.RNNBase):
        if not target.bidirectional:
            yield Kind(TorchRecurrent, claim, note="decodes with its hidden state")
        return
    if _find_methods(target, ("step",)):
        words = "decodes with {} and step"
        allocates = _find_methods(target, ("allocate_inference_cache",))
        for timed in (True, False) if allocates else ():
            yield Kind(Allocated, {"timed": timed, **claim}, note=words.format(*allocates))
        for initial in (*_find_methods(target, INITIAL), None):
            for timed in (False, True):
                options = {"initial": initial, "timed": timed, **claim}
                note = words.format(initial) if initial else "decodes with step, from None"
                yield Kind(Stepping, options, note=note)
    for name in STATES:
        if name in parameters:
            flag = next((flag for flag in FLAGS if flag in parameters), None)
            initials = (
                (*_find_methods(target, INITIAL), None)
                if _is_required(parameters[name])
                else (None,)
            )
            for initial in initials:
                options = {"name": name, "flag": flag, "initial": initial, **claim}
                yield Kind(Returned, options, note=f"decodes with the {name} that it returns")


def is_hugging_face(target: Any) -> bool:
    """Whether a module is a model of transformers; does not import that library."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(target, library.PreTrainedModel)


def knows_differences_only(config: Any, takes_positions: bool) -> bool | None:
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


def _get_parameters(target: Any) -> dict[str, Parameter]:
    """Return the parameters of a module's forward, or of a function, except the first."""
    try:
        found = signature(target.forward if isinstance(target, nn.Module) else target).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return {}
    return dict(list(found.items())[1:])


def _is_required(parameter: Parameter | None) -> bool:
    return parameter is not None and parameter.default is Parameter.empty


def _find_methods(target: Any, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if callable(getattr(target, name, None))]


def _is_batch_second(target: Any) -> bool:
    """Whether batch_first is False in a module, or in the attention of torch's encoder."""
    if isinstance(target, nn.TransformerEncoder):
        target = target.layers[0]
    if isinstance(target, nn.TransformerEncoderLayer):
        target = target.self_attn
    return getattr(target, "batch_first", None) is False


def _has_rotary(target: nn.Module) -> bool:
    names = vars(sys.modules[type(target).__module__])
    configured = any(hasattr(part, "config") for part in target.modules())
    return configured and any(name.endswith("RotaryEmbedding") for name in names)

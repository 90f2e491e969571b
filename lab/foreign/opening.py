"""Open a language model of another library: find its parts, and check that they are understood."""

import inspect
import sys
import traceback
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab import peers
from lab.files import shorten_message
from lab.foreign.attention import IMPLEMENTATION, ForeignAttention, register_attention
from lab.foreign.mamba import find_scan_class
from lab.foreign.mixer import ForeignMixer, Route, is_close
from lab.foreign.opened import OpenedBlock, OpenedModel
from lab.foreign.parts import Parts, Seen, find_final_norm, find_layers, find_parts
from lab.laws.adapters import is_hugging_face
from lab.layers.mixer import MatrixMixer
from tasks.bounds import check_choice

NORMS = "fla.modules.norm.layernorm"
GATED_NORMS = "fla.modules.norm.layernorm_gated"
SLOW = ("fla.layers.mamba", "fla.layers.mamba2")
"""The layers that have a slow path."""
HUB = "transformers.integrations.hub_kernels"
"""Where transformers wraps a function to call another package's instead."""


def use_reference_forms(foreign: nn.Module) -> None:
    """Let what a model on a CPU computes by small kernels be computed in torch; changes it."""
    parts: list[Any] = list(foreign.modules())
    for module in parts:
        own = next(module.parameters(), None)
        if own is None or own.device.type != "cpu":
            continue
        if type(module).__module__ in SLOW and module.activation in ("silu", "swish"):
            module.act = F.silu
        kind = type(module).__module__, type(module).__name__
        if kind == (NORMS, "RMSNorm"):
            module.forward = partial(_norm, module)
        elif kind == (GATED_NORMS, "RMSNormGated"):
            module.forward = partial(_norm_gated, module)
        else:
            _call_plain_functions(module)


def _call_plain_functions(module: Any) -> None:
    """Let a layer of transformers call its functions in torch, not the kernels of other packages.

    transformers takes these wherever they are installed, on a CPU too, where they cannot run.
    """
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType) or "forward" in vars(module):
        return
    plain: dict[str, Any] = {}
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if isinstance(function, FunctionType) and function.__globals__["__name__"] == HUB:
            plain[name] = vars(function)["__wrapped__"]
    if plain:
        own = FunctionType(
            forward.__code__,
            forward.__globals__ | plain,
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        )
        own.__kwdefaults__ = forward.__kwdefaults__
        module.forward = MethodType(own, module)


def _norm(
    module: Any,
    x: Tensor,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    of = peers.load(NORMS)
    x = x.to(torch.float32) if residual_in_fp32 and residual is not None else x
    weight, bias = module.weight, module.bias
    return of.rms_norm_ref(x, weight, bias, residual, module.eps, prenorm, upcast=True)


def _norm_gated(module: Any, x: Tensor, z: Tensor | None = None) -> Tensor:
    of = peers.load(GATED_NORMS)
    return of.rms_norm_ref(
        x, module.weight, module.bias, z, module.eps, module.group_size, module.norm_before_gate
    )


Result = TypeVar("Result")
KINDS = {"hf": "transformers", "fla": "flash-linear-attention, whose models are transformers' too"}
"""What `open_model` opens."""
PROBE = 2, 7
"""Rows and tokens on which a model is tried."""
LARGE = 100
"""Factor on what the head reads while its logits are compared."""


def open_model(kind: str, model: nn.Module) -> OpenedModel:
    """Open a causal language model of another library like one of the lab's.

    `lab.open` calls this.

    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> config = LlamaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2,
    ...                      intermediate_size=32, num_attention_heads=2)
    >>> model = open_model("hf", AutoModelForCausalLM.from_config(config).eval())
    >>> logits, cache = model.run_with_cache(torch.zeros(1, 5, dtype=torch.long))
    >>> cache["pattern", 1].shape
    torch.Size([1, 2, 5, 5])

    The opened model shares the given one's weights, and changes nothing else of it. Attention that
    uses transformers' attention interface, Mamba and Mamba-2 offer their matrix; other mixers do
    not, but are run, hooked, patched and trained all the same.

    Args:
        kind: "hf" or "fla".
        model: a model with a language modelling head, on any device and in any dtype.

    Raises:
        ValueError: for an unknown kind, a model that is not a causal language model of
            transformers, one without known layers, one that cannot run here, or one whose logits
            the lab would not reproduce.
        MissingPeerError: where the library is not installed.
    """
    check_choice("kind", kind, KINDS)
    peers.load("fla" if kind == "fla" else "transformers")
    name = type(model).__name__
    _check_model(model, name)
    foreign: Any = deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    foreign.eval()
    use_reference_forms(foreign)
    table = foreign.get_input_embeddings().weight
    tokens = torch.arange(PROBE[0] * PROBE[1], device=table.device).view(PROBE) % len(table)
    with torch.no_grad():
        expected = _run(name, tokens.device, lambda: _compute_large_logits(foreign, tokens))
        try:
            opened = _build(foreign, tokens)
            opened.find_factors(tokens, expected / LARGE)
            opened.compare_stream(tokens)
            found = opened(tokens)
        except Exception as error:
            reason = shorten_message(error) or type(error).__name__
            raise ValueError(f"model={name}: cannot be opened: {reason}") from error
    if not is_close(LARGE * found, expected):
        raise ValueError(
            f"model={name}: its logits are not its output embedding applied to its last hidden "
            "state, or one of its parts is misread; the lab would compute other logits"
        )
    return opened.train(model.training)


def _check_model(model: nn.Module, name: str) -> None:
    if not is_hugging_face(model):
        raise ValueError(
            f"model={name}: must be a model of transformers (PreTrainedModel), such as "
            "AutoModelForCausalLM.from_pretrained returns"
        )
    of: Any = model
    if of.config.is_encoder_decoder:
        raise ValueError(f"model={name}: must be a decoder, and this one has an encoder too")
    head = of.get_output_embeddings()
    if head is None:
        raise ValueError(
            f"model={name}: has no output embedding; open a model with a language-model head"
        )
    if getattr(head, "bias", None) is not None:
        raise ValueError(f"model={name}: its output embedding has a bias, and the lab's has none")
    if {p.device for p in model.parameters()} == {torch.device("meta")}:
        raise ValueError(f"model={name}: its weights are on the meta device, must be loaded")


def _run(name: str, device: torch.device, call: Callable[[], Result]) -> Result:
    """Return what a call of a model does; errors of missing kernels and the like become one line.

    Most layers of flash-linear-attention call Triton kernels and have no other form.

    Raises:
        ValueError: where the model cannot run on this machine.
    """
    try:
        return call()
    except Exception as error:
        reason = shorten_message(error) or type(error).__name__
        frames = traceback.extract_tb(error.__traceback__)
        kernel = any("/triton/" in frame.filename for frame in frames) or "cuda" in reason.lower()
        if kernel and device.type == "cpu":
            reason = (
                "it computes with Triton or CUDA kernels alone, which need a GPU; of "
                "flash-linear-attention's models, Mamba and Mamba2 run on a CPU"
            )
        raise ValueError(f"model={name}: cannot run on {device.type}: {reason}") from error


def _compute_large_logits(foreign: Any, tokens: Tensor) -> Tensor:
    """Return the logits of a last hidden state `LARGE` times its size: a cap on them shows."""
    head = foreign.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda head, args: (LARGE * args[0],))
    try:
        return foreign(input_ids=tokens, use_cache=False).logits
    finally:
        handle.remove()


def _build(foreign: Any, tokens: Tensor) -> OpenedModel:
    """Return an opened model, in which every mixer's matrix is what the mixer applies."""
    backbone = foreign.base_model
    depth = foreign.config.get_text_config().num_hidden_layers
    layers = find_layers(backbone, depth)
    x = foreign.get_input_embeddings()(tokens)
    parts = find_parts(backbone, layers, x)
    norm_final = find_final_norm(backbone, x)
    mixers = [seen.part for part in parts for seen in part.mixers]
    if any(find_mixer_class(mixer) is ForeignAttention for mixer in mixers):
        register_attention()
        foreign.set_attn_implementation(IMPLEMENTATION)
    rehearse = partial(_run_on_zeros, backbone)
    routes = [[_put_route(part, seen, rehearse) for seen in part.mixers] for part in parts]
    for part, made in zip(parts, routes, strict=True):
        for seen, route in zip(part.mixers, made, strict=True):
            if not _applies_its_matrix(route.mixer, seen.given[1:]):
                route.mixer = ForeignMixer(seen.part, rehearse)
            elif isinstance(route.mixer, ForeignAttention):
                route.mixer.watch_rotation(seen.given)
    blocks = [OpenedBlock(part, made) for part, made in zip(parts, routes, strict=True)]
    return OpenedModel(foreign, backbone, blocks, norm_final)


def _put_route(part: Parts, seen: Seen, rehearse: Callable[[Tensor], object]) -> Route:
    """Put a route in a mixer's place."""
    route = Route(find_mixer_class(seen.part)(seen.part, rehearse))
    setattr(part.layer, seen.name, route)
    return route


@torch.no_grad()
def _run_on_zeros(backbone: nn.Module, x: Tensor) -> None:
    """Run a model on one row of embeddings of the length of x [b t d]."""
    backbone(inputs_embeds=torch.zeros_like(x[:1]), use_cache=False)


def find_mixer_class(module: nn.Module) -> type[ForeignMixer]:
    """Return what calls a foreign mixer, with a matrix where its kind is known."""
    scan = find_scan_class(module)
    if scan is not None:
        return scan
    # Attention, or another layer in a file that has some; the check of its matrix tells them apart.
    uses = "ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[type(module).__module__])
    return ForeignAttention if uses else ForeignMixer


def _applies_its_matrix(mixer: ForeignMixer, x: Tensor) -> bool:
    """Whether a mixer that offers a matrix applies it, on an input that it has read before."""
    if not isinstance(mixer, MatrixMixer):
        return True
    try:
        return is_close(mixer.project(x, mixer.matrix(x) @ mixer.values(x)), mixer(x))
    except Exception:
        return False

"""Open a language model of another library: find its parts, and check that they are understood."""

import sys
import traceback
from collections.abc import Callable
from copy import deepcopy
from functools import partial
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
from lab.foreign.parts import Parts, find_final_norm, find_layers, find_parts
from lab.laws.adapters import is_hugging_face
from lab.layers.mixer import MatrixMixer
from tasks.bounds import check_choice

NORMS = "fla.modules.norm.layernorm"
GATED_NORMS = "fla.modules.norm.layernorm_gated"
SLOW = ("fla.layers.mamba", "fla.layers.mamba2")
"""The layers that have a slow path."""


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
        opened = _run(name, tokens.device, lambda: _build(foreign, tokens))
        found = opened(tokens)
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
                "flash-linear-attention's models, Mamba and Mamba2 run on a CPU, and models of "
                "transformers that use its kernels may run where it is not installed"
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
    if any(_uses_interface(part.mixer) for part in parts):
        register_attention()
        foreign.set_attn_implementation(IMPLEMENTATION)
    rehearse = partial(_run_on_zeros, backbone)
    routes = [_put_route(part, rehearse) for part in parts]
    for part, route in zip(parts, routes, strict=True):
        if not _applies_its_matrix(route.mixer, part.given[1:]):
            route.mixer = ForeignMixer(part.mixer, rehearse)
        elif isinstance(route.mixer, ForeignAttention):
            route.mixer.watch_rotation(part.given)
    blocks = [OpenedBlock(part, route) for part, route in zip(parts, routes, strict=True)]
    model = OpenedModel(foreign, backbone, blocks, norm_final)
    model.compare_stream(tokens)
    return model


def _put_route(part: Parts, rehearse: Callable[[Tensor], object]) -> Route:
    """Put a route in a mixer's place."""
    route = Route(find_mixer_class(part.mixer)(part.mixer, rehearse))
    setattr(part.layer, part.name, route)
    return route


@torch.no_grad()
def _run_on_zeros(backbone: nn.Module, x: Tensor) -> None:
    """Run a model on one row of embeddings of the length of x [b t d]."""
    backbone(inputs_embeds=torch.zeros_like(x[:1]), use_cache=False)


def find_mixer_class(module: nn.Module) -> type[ForeignMixer]:
    """Return what calls a foreign mixer, with a matrix where its kind is known."""
    if _uses_interface(module):
        return ForeignAttention
    return find_scan_class(module) or ForeignMixer


def _applies_its_matrix(mixer: ForeignMixer, x: Tensor) -> bool:
    """Whether a mixer that offers a matrix applies it, on an input that it has read before."""
    if not isinstance(mixer, MatrixMixer):
        return True
    try:
        return is_close(mixer.project(x, mixer.matrix(x) @ mixer.values(x)), mixer(x))
    except Exception:
        return False


def _uses_interface(module: nn.Module) -> bool:
    """Whether a layer computes attention through transformers' attention interface."""
    names = vars(sys.modules[type(module).__module__])
    return "ALL_ATTENTION_FUNCTIONS" in names and hasattr(module, "is_causal")

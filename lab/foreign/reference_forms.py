"""flash-linear-attention on a CPU: reference forms of norms and SiLU in place of Triton kernels.

With these, the library's Mamba and Mamba-2 run by their slow path. Its other layers need kernels.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab import peers

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

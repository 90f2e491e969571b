"""Changing the arithmetic inside a foreign module: fp64 throughout, or rounded angles."""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CASTS = ("to", "float", "half", "bfloat16", "type", "type_as")
LOWER = (torch.float32, torch.bfloat16, torch.float16)
ANGLES = {"cos": 0, "sin": 0, "exp": 0, "polar": 1}
"""The argument that holds the angles, by function."""
IN_PLACE = ("cos_", "sin_", "exp_")


class Exact(TorchFunctionMode):
    """Keeps tensors in fp64 that a module casts to less, to measure the errors of those casts."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call a function without its cast."""
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in LOWER:
            kwargs["dtype"] = torch.float64
        name = getattr(func, "__name__", "")
        if name == "rms_norm" and len(args) < 4 and kwargs.get("eps") is None:
            # The default eps depends on the precision; a difference of eps is no rounding error.
            kwargs["eps"] = torch.finfo(torch.float32).eps
        found = func(*args, **kwargs)
        if name in CASTS and isinstance(found, Tensor):
            return args[0].to(found.device, torch.float64) if found.dtype in LOWER else found
        return found


class RoundedAngles(TorchFunctionMode):
    """Rounds the angles in arguments of sin, cos, polar and complex exponentials to fp32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call a function on rounded angles."""
        name = getattr(func, "__name__", "")
        if name in IN_PLACE:
            args[0].copy_(_round(args[0], real=name != "exp_"))
        elif name in ANGLES and len(args) > ANGLES[name]:
            i = ANGLES[name]
            args = (*args[:i], _round(args[i], real=name != "exp"), *args[i + 1 :])
        return func(*args, **(kwargs or {}))


def _round(x: Tensor, real: bool) -> Tensor:
    """Round angles to fp32: the imaginary part of complex x, or all of x if `real`."""
    if x.is_complex():
        return torch.complex(x.real, x.imag.float().to(x.imag.dtype))
    return x.float().to(x.dtype) if real and x.is_floating_point() else x

"""Other arithmetic inside a module that is not ours to change: exact, or with rounded angles."""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CASTS = ("to", "float", "half", "bfloat16", "type", "type_as")
LOWER = (torch.float32, torch.bfloat16, torch.float16)
ANGLES = {"cos": 0, "sin": 0, "exp": 0, "polar": 1}
"""Where the angles stand among the arguments."""
IN_PLACE = ("cos_", "sin_", "exp_")


class Exact(TorchFunctionMode):
    """Keeps in fp64 what a module casts to less: its own precision is what is to be measured."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call a function, but for its cast."""
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in LOWER:
            kwargs["dtype"] = torch.float64
        name = getattr(func, "__name__", "")
        if name == "rms_norm" and len(args) < 4 and kwargs.get("eps") is None:
            # What is added to the squares by default is the precision's own, not a rounding.
            kwargs["eps"] = torch.finfo(torch.float32).eps
        found = func(*args, **kwargs)
        if name in CASTS and isinstance(found, Tensor):
            return args[0].to(found.device, torch.float64) if found.dtype in LOWER else found
        return found


class RoundedAngles(TorchFunctionMode):
    """Rounds to fp32 the angles that sin, cos, polar and a complex exponential are given."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call a function on rounded angles."""
        name = getattr(func, "__name__", "")
        if name in IN_PLACE:
            args[0].copy_(_rounded(args[0], real=name != "exp_"))
        elif name in ANGLES and len(args) > ANGLES[name]:
            i = ANGLES[name]
            args = (*args[:i], _rounded(args[i], real=name != "exp"), *args[i + 1 :])
        return func(*args, **(kwargs or {}))


def _rounded(x: Tensor, real: bool) -> Tensor:
    """Return x with its angles as fp32 has them: the imaginary part, or all where it is real."""
    if x.is_complex():
        return torch.complex(x.real, x.imag.float().to(x.imag.dtype))
    return x.float().to(x.dtype) if real and x.is_floating_point() else x

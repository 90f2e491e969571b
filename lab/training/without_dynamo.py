"""Optimizers that leave torch._dynamo alone, whose import takes as long as torch's own."""

import inspect
from typing import Any

import torch
from torch.optim import Optimizer


class WithoutDynamo:
    """The methods that `torch.optim.Optimizer` has wrapped to exclude them from compilation.

    The wrappers import torch._dynamo, which takes some two seconds at the start of every process
    that trains. The lab compiles models only, never an optimizer's methods.
    """

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)


class AdamW(WithoutDynamo, torch.optim.AdamW):
    """`torch.optim.AdamW`, bit for bit."""

    step: Any = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))

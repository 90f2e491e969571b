"""Copies of modules, to be changed and called in their place."""

from copy import deepcopy

import torch
from torch import nn


def copied(module: nn.Module) -> nn.Module:
    """Return a deep copy whose parameters are leaves that ask for gradients where the others do.

    A copied ScriptModule would have results in their place, whose gradients nobody sees.
    """
    with torch.no_grad():
        copy = deepcopy(module)
    for ours, theirs in zip(copy.parameters(), module.parameters(), strict=True):
        if ours.requires_grad != theirs.requires_grad:
            ours.requires_grad_(theirs.requires_grad)
    return copy

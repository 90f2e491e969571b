"""Copies of modules that can be changed while the original stays as it is."""

from copy import deepcopy

import torch
from torch import nn


def copy_module(module: nn.Module) -> nn.Module:
    """Return a deep copy whose parameters are leaves and require gradients where the originals do.

    Parameters of a copied ScriptModule would otherwise be results, which collect no gradients.
    """
    with torch.no_grad():
        copy = deepcopy(module)
    for ours, theirs in zip(copy.parameters(), module.parameters(), strict=True):
        if ours.requires_grad != theirs.requires_grad:
            ours.requires_grad_(theirs.requires_grad)
    return copy

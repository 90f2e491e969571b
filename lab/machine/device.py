"""Choosing the device to compute on, and naming it."""

import torch

from lab.machine.processor import describe_machine
from tasks.near_names import list_choices


def choose_device(name: str) -> torch.device:
    """Return the device that a user names; "auto" means CUDA if there is any, else the CPU.

    Raises:
        ValueError: for an unknown name, or a device that this machine does not have.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name}: {list_choices(name, ('auto', 'cpu', 'cuda', 'cuda:N'))}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name}: this machine has no CUDA device; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ValueError(f"device={name}: this machine has cuda:0 to cuda:{last}")
    return device


def describe_device(device: torch.device) -> str:
    """Return all that the speed of training on a device depends on, apart from the run."""
    if device.type == "cpu":
        return describe_machine()
    return f"{torch.cuda.get_device_name(device)}, {describe_machine()}"

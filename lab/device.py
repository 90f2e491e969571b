"""Where to compute, and in which precision."""

import torch


def choose_device(name: str) -> torch.device:
    """Return the device a user names; "auto" takes CUDA where there is any.

    Raises:
        ValueError: for an unknown name, or a device this machine does not have.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name}: must be auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name}: must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name}: this machine has no CUDA device; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ValueError(f"device={name}: this machine has cuda:0 to cuda:{last}")
    return device


def bf16_pays(device: torch.device) -> bool:
    """Whether matrix products in bf16 are faster than in fp32 there (LOG.md has the ratios)."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()

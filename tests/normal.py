"""Random inputs that do not depend on torch's global generator."""

import torch
from torch import Tensor


def draw_normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw standard normal numbers in fp64, then convert them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

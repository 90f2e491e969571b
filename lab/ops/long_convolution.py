"""A causal convolution of each channel with a filter as long as the row.

    y_t = Σ_{s≤t} f_{t−s} x_s

One Fourier transform of the row would let the rounding of later tokens reach earlier ones. Here
blocks of `LEAF` tokens are computed as a matrix; then in each pair of neighbouring blocks what the
first adds to the second, for blocks of twice the size, and so on: t log² t.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lab.ops.precision import keep_dtypes

LEAF = 32


@keep_dtypes
def convolve(x: Float[Tensor, "b t c"], taps: Float[Tensor, "t c"]) -> Float[Tensor, "b t c"]:
    """Return the sums, in x's dtype.

    >>> import torch
    >>> convolve(torch.ones(1, 3, 1), torch.tensor([[1.0], [2.0], [4.0]])).flatten().tolist()
    [1.0, 3.0, 7.0]

    Args:
        x: inputs of t ≥ 1 tokens.
        taps: f, as many as tokens.

    Raises:
        ValueError: for another number of taps or channels, or no tokens.
    """
    _check(x, taps)
    t, size = x.shape[1], LEAF
    whole = size
    while whole < t:
        whole *= 2
    x, taps = F.pad(x, (0, 0, 0, whole - t)), F.pad(taps, (0, 0, 0, whole - t))
    blocks = torch.einsum("cts,bksc->bktc", toeplitz(taps[:size]), x.unflatten(1, (-1, size)))
    y = blocks.flatten(1, 2)
    while size < whole:
        spectrum = torch.fft.rfft(taps[: 2 * size], dim=0)
        first = x.unflatten(1, (-1, 2, size))[:, :, 0]
        product = torch.fft.rfft(first, 2 * size, dim=2) * spectrum
        added = torch.fft.irfft(product, 2 * size, dim=2)[:, :, size:]
        y = y + F.pad(added, (0, 0, size, 0)).flatten(1, 2)
        size *= 2
    return y[:, :t]


def convolve_directly(
    x: Float[Tensor, "b t c"], taps: Float[Tensor, "t c"]
) -> Float[Tensor, "b t c"]:
    """Return what `convolve` returns, by the matrix: the definition; quadratic."""
    _check(x, taps)
    return torch.einsum("cts,bsc->btc", toeplitz(taps), x)


def toeplitz(taps: Float[Tensor, "t c"]) -> Float[Tensor, "c t s"]:
    """Return each channel's convolution as a matrix."""
    at = torch.arange(len(taps), device=taps.device)
    distance = at[:, None] - at
    return taps.mT[:, distance.clamp(min=0)].masked_fill(distance < 0, 0)


def _check(x, taps) -> None:
    if x.shape[1] == 0:
        raise ValueError("there are t=0 tokens, must be at least 1")
    if taps.shape != x.shape[1:]:
        raise ValueError(f"taps is {list(taps.shape)}, must be {[*x.shape[1:]]}")

"""The matrix products of a piece of work alone: what it would take if all else cost nothing."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lab.bench.ratio import time_median


class Product(NamedTuple):
    """The sizes of a batch of products [b m k] · [b k n]."""

    b: int
    m: int
    k: int
    n: int


def record_products(call: Callable[[], object]) -> Counter[Product]:
    """Return the matrix products of a call and of its backward, and how often each is made.

    Causal attention in one kernel counts as the products that it needs: each query with half of
    the keys.
    """
    with _Recorder() as recorder:
        call()
    return recorder.products


def time_products(products: Mapping[Product, int], dtype: torch.dtype = torch.float32) -> float:
    """Return the seconds that these products take by themselves, with as many threads as torch has.

    This is less than within any piece of work: operands are contiguous, results have their memory,
    and products of the same sizes follow one another, so that small ones stay in cache.
    """
    return sum(_time_product(product, count, dtype) for product, count in products.items())


def count_flops(products: Mapping[Product, int]) -> int:
    """Return the floating-point operations of these products."""
    return sum(2 * count * b * m * k * n for (b, m, k, n), count in products.items())


def _time_product(product: Product, count: int, dtype: torch.dtype) -> float:
    b, m, k, n = product
    x, y = torch.randn(b, m, k).to(dtype), torch.randn(b, k, n).to(dtype)
    out = torch.empty(b, m, n, dtype=dtype)

    def multiply() -> None:
        for _ in range(count):
            torch.bmm(x, y, out=out)

    return time_median(multiply)


class _Recorder(TorchDispatchMode):
    """Records the products of what is called under it."""

    def __init__(self):
        super().__init__()
        self.products: Counter[Product] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if name in ("mm", "bmm"):
            self._count(*tensors[:2])
        elif name in ("addmm", "baddbmm", "baddbmm_"):
            self._count(*tensors[1:3])
        elif name == "_scaled_dot_product_flash_attention_for_cpu":
            self._count_attention(*tensors[:3], forward=True)
        elif name == "_scaled_dot_product_flash_attention_for_cpu_backward":
            self._count_attention(*tensors[1:4], forward=False)
        return func(*args, **(kwargs or {}))

    def _count(self, x: Tensor, y: Tensor) -> None:
        b = x.shape[0] if x.ndim == 3 else 1
        self.products[Product(b, x.shape[-2], x.shape[-1], y.shape[-1])] += 1

    def _count_attention(self, q: Tensor, k: Tensor, v: Tensor, *, forward: bool) -> None:
        b, half, keys = q.shape[:-2].numel(), q.shape[-2] // 2, k.shape[-2]
        d, d_value = k.shape[-1], v.shape[-1]
        self.products[Product(b, half, d, keys)] += 1  # scores, which backward computes again
        if forward:
            self.products[Product(b, half, keys, d_value)] += 1
        else:
            self.products[Product(b, half, d_value, keys)] += 1  # gradient of the pattern
            self.products[Product(b, keys, half, d_value)] += 1  # of v
            self.products[Product(b, half, keys, d)] += 1  # of q
            self.products[Product(b, keys, half, d)] += 1  # of k

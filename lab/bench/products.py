"""The matrix products of a piece of work alone: what it would take if all else cost nothing."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lab.bench.replay import time_alone

CPU = torch.device("cpu")


class Product(NamedTuple):
    """The sizes of a batch of products [b m k] · [b k n], and what its numbers are."""

    b: int
    m: int
    k: int
    n: int
    dtype: torch.dtype = torch.float32

    @property
    def flops(self) -> int:
        """Its floating-point operations."""
        return 2 * self.b * self.m * self.k * self.n


def record_products(call: Callable[[], object]) -> Counter[Product]:
    """Return the matrix products of a call and of its backward, and how often each is made.

    Causal attention in one kernel counts as the products that it needs: each query with half of
    the keys.
    """
    with _Recorder() as recorder:
        call()
    return recorder.products


def time_products(products: Mapping[Product, int], device: torch.device = CPU) -> float:
    """Return the seconds that these products take by themselves.

    On a CPU they use as many threads as torch has; on a GPU they are one CUDA graph. This is less
    than within any piece of work: operands are contiguous, results have their memory, and products
    of the same sizes follow one another, so that small ones stay in cache.
    """
    operands = [(_draw_operands(product, device), count) for product, count in products.items()]

    def multiply() -> None:
        for (x, y, out), count in operands:
            for _ in range(count):
                torch.bmm(x, y, out=out)

    return time_alone(multiply, device)


def count_flops(products: Mapping[Product, int]) -> int:
    """Return the floating-point operations of these products."""
    return sum(count * product.flops for product, count in products.items())


def find_products(name: str, args: Sequence[object]) -> list[Product]:
    """Return the matrix products that an operation of torch makes; none for any other."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    name = name.removesuffix("_")
    if name in ("mm", "bmm"):
        return [_describe(*tensors[:2])]
    if name in ("addmm", "baddbmm"):
        return [_describe(*tensors[1:3])]
    if found := re.fullmatch(r"_scaled_dot_product_\w+?_attention(_for_cpu)?(_backward)?", name):
        backward = found[2] is not None  # its first tensor is the gradient of the output
        return _list_attention(*tensors[backward:][:3], backward=backward)
    return []


def _draw_operands(product: Product, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    b, m, k, n, dtype = product
    x, y = torch.randn(b, m, k).to(device, dtype), torch.randn(b, k, n).to(device, dtype)
    return x, y, torch.empty(b, m, n, dtype=dtype, device=device)


class _Recorder(TorchDispatchMode):
    """Records the products of what is called under it."""

    def __init__(self):
        super().__init__()
        self.products: Counter[Product] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products.update(find_products(func.overloadpacket.__name__, args))
        return func(*args, **(kwargs or {}))


def _describe(x: Tensor, y: Tensor) -> Product:
    b = x.shape[0] if x.ndim == 3 else 1
    return Product(b, x.shape[-2], x.shape[-1], y.shape[-1], x.dtype)


def _list_attention(q: Tensor, k: Tensor, v: Tensor, *, backward: bool) -> list[Product]:
    b, half, keys = q.shape[:-2].numel(), q.shape[-2] // 2, k.shape[-2]
    d, d_value = k.shape[-1], v.shape[-1]
    sizes = [(half, d, keys)]  # scores, which backward computes again
    if backward:
        sizes.append((half, d_value, keys))  # gradient of the pattern
        sizes.append((keys, half, d_value))  # of v
        sizes.append((half, keys, d))  # of q
        sizes.append((keys, half, d))  # of k
    else:
        sizes.append((half, keys, d_value))
    return [Product(b, *size, q.dtype) for size in sizes]

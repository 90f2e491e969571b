"""One thread of the CPU for work that is too small to be shared among several.

Threads wait for one another at the end of each operation. Where an operation takes microseconds
and another process keeps a core busy, that wait is a thousand times as long as the work.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from tasks.lazy import torch

LARGE = 2**19
"""Elements of a tensor from which its operations are worth several threads."""


@contextmanager
def use_one_thread(elements: int = 0) -> Iterator[None]:
    """Let torch compute a `with` block on one thread, unless its tensors are large.

    The caller's number of threads is back after the block. Other Python threads keep theirs, also
    those that start meanwhile. A GPU is not affected, and torch.compile sees an empty block.

    Args:
        elements: of the block's usual tensors; from `LARGE` on nothing changes.
    """
    if elements >= LARGE or torch.compiler.is_compiling() or torch.get_num_threads() == 1:
        yield
        return
    before = torch.get_num_threads()
    set_openmp, set_mkl = _find_setters()
    set_openmp(1)
    mkl_before = set_mkl(1)
    try:
        yield
    finally:
        set_openmp(before)
        set_mkl(mkl_before)


@cache
def _find_setters() -> tuple[Callable[[int], Any], Callable[[int], int]]:
    """Return what sets OpenMP's and MKL's threads for the calling thread; MKL's returns the last.

    `torch.set_num_threads` would also set what threads get that start meanwhile, for good. It
    stands in where torch's library does not show OpenMP's function, as on Windows.
    """
    library = ctypes.PyDLL(torch._C.__file__)
    return (
        getattr(library, "omp_set_num_threads", torch.set_num_threads),
        getattr(library, "MKL_Set_Num_Threads_Local", lambda count: count),
    )

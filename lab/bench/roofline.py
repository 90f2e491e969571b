"""What share of a GPU's roofline a recorded training step reaches, and what keeps it from more.

The roofline (Williams, Waterman and Patterson, 2009): an operation takes at least as long as its
floating-point operations at the rate of the fastest matrix product, and as what it reads and writes
at the rate of the fastest copy, both measured here. The bound of a step is the sum over its
operations. What stays in a GPU's cache can be faster than that copy, so a share may exceed 1.

A small step is far from it, since no kernel takes less than a microsecond or two, whatever its
size. So each step is also compared with the bound in which no operation takes less than the
smallest kernel does.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lab.bench.graphs import prepare
from lab.bench.products import Product, find_products, time_products
from lab.bench.ratio import Ratio, time_median
from lab.bench.replay import count_kernels, time_alone
from lab.bench.stepping import begin, describe_steps
from lab.bench.traffic import count_traffic, time_traffic
from lab.training.loop import differentiate

SETTINGS = (
    ("AM*2", 64, 256, 64),
    ("AM*2", 256, 8192, 16),
    ("AM*2", 2048, 8192, 2),
    ("AM*2", 2048, 8192, 32),
    ("SM*2", 2048, 8192, 2),
    ("SE IE", 2048, 8192, 2),
)
"""(stack, seq_len, vocab_size, rows a step)."""
MATRIX_SIZE, COPIED_BYTES, SMALL_KERNELS = 8192, 2**30, 1000
REPEATS = 21


class Rates(NamedTuple):
    """What a GPU does at most in a second.

    Attributes:
        flops: floating-point operations of matrix products, by the dtype of their numbers.
        bytes: read and written.
        smallest: the seconds of a kernel that does next to nothing, in a graph.
    """

    flops: dict[torch.dtype, float]
    bytes: float
    smallest: float

    def __str__(self) -> str:
        flops = (f"{1e-12 * rate:.0f} in {str(dtype)[6:]}" for dtype, rate in self.flops.items())
        moved, smallest = 1e-12 * self.bytes, 1e6 * self.smallest
        return f"{', '.join(flops)} TFLOP/s; {moved:.2f} TB/s; smallest kernel {smallest:.1f} µs"


class Roofline(TorchDispatchMode):
    """Adds up the least time of all operations in a `with` block.

    Attributes:
        seconds: so far.
        kernel_seconds: the same, where none takes less than the smallest kernel.
        operations: how many there were, without views and new memory.
    """

    def __init__(self, rates: Rates):
        super().__init__()
        self.seconds = self.kernel_seconds = 0.0
        self.operations = 0
        self._rates = rates

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Carry out an operation and add its least time."""
        result = func(*args, **(kwargs or {}))
        products = find_products(func.overloadpacket.__name__, args)
        computing = sum(each.flops / self._rates.flops[each.dtype] for each in products)
        moving = count_traffic(func, args, kwargs or {}, result) / self._rates.bytes
        if computing or moving:
            self.operations += 1
            self.seconds += max(computing, moving)
            self.kernel_seconds += max(computing, moving, self._rates.smallest)
        return result


def measure() -> list[Ratio]:
    """Measure each setting in each precision."""
    device = torch.device("cuda")
    rates = measure_rates(device)
    return [
        ratio
        for setting in SETTINGS
        for precision in ("fp32", "bf16")
        for ratio in _compare(setting, precision, rates, device)
    ]


def measure_rates(device: torch.device) -> Rates:
    """Measure one large product in each precision, one large copy, and many small kernels."""
    product = Product(1, MATRIX_SIZE, MATRIX_SIZE, MATRIX_SIZE)
    flops = {
        dtype: product.flops / time_products({product._replace(dtype=dtype): 1}, device)
        for dtype in (torch.float32, torch.bfloat16)
    }
    number = torch.zeros(1, device=device)

    def start_small_kernels() -> None:
        for _ in range(SMALL_KERNELS):
            number.add_(1)

    smallest = time_alone(start_small_kernels, device) / SMALL_KERNELS
    copying = time_traffic({2 * COPIED_BYTES: 1}, device)
    return Rates(flops, 2 * COPIED_BYTES / copying, smallest)


def prepare_calls(
    setting: tuple[str, int, int, int], precision: str, device: torch.device
) -> Callable[[], object]:
    """Return a function that takes a step call by call, and draws its rows as a recorded one."""
    run = describe_steps(*setting)
    state = begin(run, precision, device)

    def take() -> None:
        batch = run.task.batch(size=run.train.batch_size, device=device)
        differentiate(state.model, batch, precision)
        for optimizer in state.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return take


def _compare(
    setting: tuple[str, int, int, int], precision: str, rates: Rates, device: torch.device
) -> list[Ratio]:
    stack, seq_len, vocab_size, rows = setting
    calls = prepare_calls(setting, precision, device)
    calls()  # makes the optimizers' state
    with Roofline(rates) as least:
        calls()
    recorded = prepare(setting, precision, records=True)
    ours = time_median(recorded, REPEATS)
    kernels, busy = count_kernels(recorded)
    where = f"{stack}, T={seq_len}, V={vocab_size}, {rows} rows, {precision}"
    return [
        Ratio.of_costs(
            f"share of the roofline, {where}",
            1e3 * ours,
            1e3 * least.seconds,
            "ms",
            None,
            f"{kernels} kernels, {1e3 * busy:.2f} ms; {torch.cuda.get_device_name()}, {rates}",
        ),
        Ratio.of_costs(
            f"share of the roofline of small kernels, {where}",
            1e3 * ours,
            1e3 * least.kernel_seconds,
            "ms",
            None,
            f"{least.operations} operations",
        ),
    ]

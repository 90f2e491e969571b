"""Estimate the memory of analyses, to refuse what cannot fit before it begins.

    a forward pass over all rows, with the input of each mixer, in proportion to the rows,
    and a block of a matrix, copied while it is measured
    or the mixers' inputs, and the matrices of all layers multiplied, T² entries each, up to
    `LONGEST_ROLLED` tokens

The pass is measured on a few rows, so the estimate holds for mixers of the user, too. The memory of
Python and torch themselves is not included.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lab.hooks import HookPoint
from lab.layers.mixer import MatrixMixer, offers_rows
from lab.machine.growth import Demand, Growth
from lab.machine.memory import format_bytes, measure_free_memory
from lab.models import LanguageModel
from lab.models.evaluation import score
from lab.models.memory import measure_model
from tasks.base import Batch, Task

BLOCK_ENTRIES = 2**22
"""Entries of a matrix that are in memory at once, if the mixer can return some of its rows."""
FLOAT = 4
"""Bytes per number."""
COPIES = 6
"""Copies of a block of a matrix while it is measured."""
LONGEST_ROLLED = 4096
"""Maximum number of tokens of a row of which the layers' matrices are multiplied: that costs T³."""
ROLLED = 16
"""Matrices of T² entries in memory while layers are multiplied; measured at 2,048 tokens."""


def estimate_memory(
    model: LanguageModel, task: Task, rows: int, only: Sequence[str] | None = None
) -> Demand:
    """Estimate what analyses of some rows of a task take.

    Matrices are read by blocks of rows, unless a mixer can only return a whole one: T² entries.

    Args:
        model: what is analysed.
        task: whose rows are.
        rows: of the batch.
        only: names of the analyses; None: all.
    """
    return max(_list_demands(model, task, rows, only), key=lambda demand: demand.total)


def _list_demands(
    model: LanguageModel, task: Task, rows: int, only: Sequence[str] | None
) -> list[Demand]:
    """Return what analyses by blocks take, and what multiplying layers takes if it is wanted.

    The first need a forward pass of all rows beside a block, the second the mixers' inputs.
    """
    growth = measure_model(task, model, max(rows, 1), _pass_forward)
    token = model.embed.weight.new_zeros(1, 1, model.embed.embedding_dim)
    blocks = model.list_blocks()
    entries = max(_count_entries(block.mixer, token, task.seq_len) for block in blocks)
    demands = [Demand(COPIES * FLOAT * entries, rows, growth)]
    if (not only or "rollout" in only) and _is_rolled_out(model, task.seq_len):
        inputs = Growth(0, FLOAT * len(blocks) * token.numel(), 0, task.seq_len)
        demands.append(Demand(ROLLED * FLOAT * task.seq_len**2, rows, inputs))
    return demands


def check_memory(
    model: LanguageModel,
    task: Task,
    rows: int,
    limit: int | None = None,
    only: Sequence[str] | None = None,
) -> None:
    """Check that analyses fit into memory.

    Args:
        model: what is analysed.
        task: whose rows are.
        rows: of the batch.
        limit: bytes; None: all that are free.
        only: names of the analyses; None: all.

    Raises:
        ValueError: naming the memory needed, the limit, and how many rows would fit.
    """
    bound = measure_free_memory() if limit is None else limit
    demands = _list_demands(model, task, rows, only)
    total = max(demand.total for demand in demands)
    if total <= bound:
        return
    # `Demand.total` cuts off the part of a byte.
    fit = min(demand.count_fitting_rows(bound + 1) for demand in demands)
    advice = f"{fit:,} row{'s' * (fit > 1)} would fit" if fit else "not even one row fits"
    size, most = format_bytes(total), format_bytes(bound)
    raise ValueError(
        f"rows={rows} of {task.seq_len:,} tokens take about {size}, must be ≤ {most} "
        f"({'free memory' if limit is None else 'memory'}); {advice}"
    )


@torch.no_grad()
def _pass_forward(model: LanguageModel, batch: Batch) -> None:
    """Run a model as analyses do: with the input of each mixer kept."""
    kept = []

    def keep(residual: Tensor, point: HookPoint) -> None:
        kept.append(residual.clone())

    with model.hooks([(lambda name: name.endswith("hook_resid_pre"), keep)]):
        score(model, batch, "fp32")


def _is_rolled_out(model: LanguageModel, seq_len: int) -> bool:
    """Whether the matrices of all layers are multiplied, which every mixer must offer."""
    mixers = [block.mixer for block in model.blocks if block.mixer is not None]
    offered = [isinstance(mixer, MatrixMixer) for mixer in mixers]
    return seq_len <= LONGEST_ROLLED and bool(offered) and all(offered)


def _count_entries(mixer: nn.Module | None, token: Tensor, seq_len: int) -> int:
    """Count the entries of a mixer's matrix that are in memory at once; 0 if it offers none."""
    if not isinstance(mixer, MatrixMixer):
        return 0
    entries = _count_heads(mixer, token) * seq_len**2
    return min(entries, BLOCK_ENTRIES) if offers_rows(mixer) else entries


@torch.no_grad()
def _count_heads(mixer: MatrixMixer, token: Float[Tensor, "1 1 d"]) -> int:
    """Count the heads of a mixer; as many as channels if a user's refuses one token."""
    try:
        return mixer.values(token).shape[1]
    except Exception:
        return token.shape[-1]

"""Batches in order, several drawn at a time.

Drawing few rows takes as long as the calls of its operations, however few rows there are: batches
of 4,096 tokens cost three to eighteen times as much a token as large ones (LOG.md).
"""

from tasks.base import MAX_ROWS, Batch, Task
from tasks.bounds import check_choice
from tasks.lazy import torch
from tasks.one_thread import use_one_thread

BLOCK_TOKENS = 2**18
"""Tokens drawn at a time, at most. More would gain nothing, as they leave the cache."""


class BatchReader:
    """Reads batches of a task's rows in order; all are the same as `Task.batch` returns.

    The first batch is drawn by itself, then 2, 4, … at a time, up to `BLOCK_TOKENS`, so a reader
    that stops soon has drawn little more than was read. Batches may be read in any order, which
    only takes longer.

    >>> from tasks import TASKS
    >>> task = TASKS["induction"](seq_len=8)
    >>> reader = BatchReader(task, size=4)
    >>> [reader.read(start).inputs.equal(task.batch(start=start, size=4).inputs)
    ...  for start in (0, 4, 8, 12)]
    [True, True, True, True]

    Args:
        task: the task that generates the rows.
        size: rows a batch.
        split: the split of the rows.
        seed: the seed of the rows.
        device: where they are drawn.
        stride: rows from one batch's first to the next one's; None: `size`.
        stop: the last row's number plus one. A batch that would go past it is shorter.

    Attributes:
        task: as given.

    Raises:
        ValueError: for a split that the task does not have, or a size below 1.
    """

    def __init__(
        self,
        task: Task,
        *,
        size: int,
        split: str = "train",
        seed: int = 0,
        device: "torch.device | str" = "cpu",
        stride: int | None = None,
        stop: int = MAX_ROWS,
    ):
        check_choice("split", split, task.splits)
        if size < 1:
            raise ValueError(f"size={size}: must be ≥ 1")
        self.task, self._size, self._split, self._seed = task, size, split, seed
        self._device, self._stride, self._stop = device, stride or size, stop
        self._most = _count_batches(task, size)
        self._block: Batch | None = None
        self._first = self._count = 0

    def read(self, start: int) -> Batch:
        """Return the batch that begins with this row.

        Raises:
            ValueError: for a row that the split does not have.
        """
        if not 0 <= start < self._stop:
            raise ValueError(f"start={start}: must be in 0 … {self._stop - 1}")
        place, rest = divmod(start - self._first, self._stride)
        if self._block is None or rest or not 0 <= place < self._count:
            self._block = None  # freed before the next one is drawn
            self._block, self._first, place = self._draw(start), start, 0
        return self._block[place * self._size : (place + 1) * self._size]

    def _draw(self, start: int) -> Batch:
        """Draw the batches from this row on, twice as many as the last time."""
        whole = (self._stop - start - self._size) // self._stride + 1
        self._count = max(1, min(2 * self._count, self._most, whole))
        size = min(self._size, self._stop - start)
        with use_one_thread():
            starts = torch.arange(self._count, device=self._device) * self._stride + start
            numbers = starts[:, None] + torch.arange(size, device=self._device)
            return self.task.generate(self._split, numbers.flatten(), self._seed)


def count_tokens_ahead(task: Task, size: int) -> int:
    """Return how many tokens a reader of batches of `size` rows holds beside its last batch."""
    return (_count_batches(task, size) - 1) * size * task.seq_len


def _count_batches(task: Task, size: int) -> int:
    """Return how many batches a reader draws at a time."""
    return max(1, BLOCK_TOKENS // (size * task.seq_len))

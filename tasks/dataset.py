"""A task's rows as a torch dataset, for training loops other than the lab's."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from tasks.base import MAX_ROWS, Task
from tasks.bounds import check_choice
from tasks.reader import BatchReader


class Rows(IterableDataset[dict[str, Any]]):
    """Batches of rows start … stop − 1, each row once over all ranks and workers.

    A batch is a dict of int64 tensors [b t]: "inputs", "targets" (-100 where unscored) and
    "roles"; inputs and targets are float32 where rows are vectors (`tasks.batch.Batch`). With
    `links`, also "links", a dict of tensors by name. A loader must not batch these again:

    >>> from torch.utils.data import DataLoader
    >>> from tasks import TASKS
    >>> task = TASKS["induction"](seq_len=8)
    >>> loader = DataLoader(Rows(task, batch_size=4, stop=10), batch_size=None)
    >>> [len(batch["inputs"]) for batch in loader]
    [4, 4, 2]

    Batch k starts at row start + k·batch_size and goes to rank k mod world_size; the workers of a
    rank take its batches in turn. So a rank sees the same batches in the same order with any number
    of workers, and the k-th batches of all ranks together are consecutive rows.

    Small batches are drawn several at a time: their tensors are views of larger ones, so clone
    what you keep or save.

    The dataset holds no state: each pass begins at `start` again. To continue after n batches of
    every rank, begin at start + n·world_size·batch_size. The last batch may be short; a rank may
    get one batch less than another, or none, unless batch_size·world_size divides the number of
    rows.

    Args:
        task: the task that generates the rows.
        split: the split of the rows.
        batch_size: rows a batch.
        seed: the seed of the rows.
        start: the first row's number.
        stop: the last row's number plus one; None for no end (2³⁶ rows).
        rank: this process, in 0 … world_size − 1.
        world_size: processes that share the rows.
        links: whether batches hold the links, too.

    Raises:
        ValueError: naming the argument, its value and its bound.
    """

    def __init__(
        self,
        task: Task,
        *,
        split: str = "train",
        batch_size: int = 64,
        seed: int = 0,
        start: int = 0,
        stop: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        links: bool = False,
    ):
        check_choice("split", split, task.splits)
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: must be ≥ 1")
        end = MAX_ROWS if stop is None else stop
        if not 0 <= end <= MAX_ROWS:
            raise ValueError(f"stop={stop}: must be in 0 … {MAX_ROWS}")
        if not 0 <= start <= end:
            raise ValueError(f"start={start}: must be in 0 … {end}")
        if world_size < 1:
            raise ValueError(f"world_size={world_size}: must be ≥ 1")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}: must be in 0 … {world_size - 1}")
        self.task, self.split, self.batch_size, self.seed = task, split, batch_size, seed
        self.start, self.stop, self.links = start, end, links
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        mine, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        first = self.start + (mine * self.world_size + self.rank) * self.batch_size
        stride = workers * self.world_size * self.batch_size
        reader = BatchReader(
            self.task,
            size=self.batch_size,
            split=self.split,
            seed=self.seed,
            stride=stride,
            stop=self.stop,
        )
        for start in range(first, self.stop, stride):
            batch = reader.read(start)
            found = {"inputs": batch.inputs, "targets": batch.targets, "roles": batch.roles}
            yield {**found, "links": dict(batch.links)} if self.links else found

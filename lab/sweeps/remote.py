"""What a machine of a cluster does: train cells in a folder of its own, and send the files home.

The folder is a temporary one, so that machines need no disk in common. A process trains them, as on
the machine of the sweep (`lab.sweeps.workers`).
"""

import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from lab.sweeps.afterwards import remove_if_killed
from lab.sweeps.folder import CellFolder
from lab.sweeps.parcels import Delivery, Files, Sender, unpack
from lab.sweeps.workers import POLL, Worker


def train_elsewhere(
    command: Sequence[str], parcels: Mapping[str, Files], max_minutes: float | None
) -> Iterator[Delivery]:
    """Train cells together; yield what is new whenever there is a checkpoint or one has ended.

    Args:
        command: the options of Python for the process that trains them.
        parcels: the files of each cell's folder, by the cell's name.
        max_minutes: most minutes; None: no limit.

    Raises:
        OSError: when the process cannot be started, or the disk is full.
    """
    stop, ended = threading.Event(), SimpleQueue[tuple[CellFolder, str | None]]()
    with (
        TemporaryDirectory(prefix="lab-cells-") as home,
        remove_if_killed(Path(home)),
        ThreadPoolExecutor(1) as pool,
    ):
        left = [CellFolder(Path(home, name)) for name in parcels]
        for folder in left:
            unpack(folder, parcels[folder.path.name])
        sender, worker = Sender(left), Worker([sys.executable, *command], {}, stop)
        training = pool.submit(
            worker.train, tuple(left), max_minutes, lambda *answer: ended.put(answer)
        )
        try:
            while left and not (training.done() and ended.empty()):
                files, errors = {}, []
                while not ended.empty():
                    folder, error = ended.get()
                    left.remove(folder)
                    files[folder.path.name] = sender.collect_ended(folder)
                    errors.append((folder.path.name, error))
                for folder, found in sender.collect(left).items():
                    files[folder.path.name] = found
                if files:
                    yield Delivery(files, errors)
                time.sleep(POLL)
            training.result()
        finally:
            stop.set()
            training.exception()
            worker.close()

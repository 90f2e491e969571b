"""Training cells on a Ray cluster: each group of cells is a task of Ray Core.

A task sends each checkpoint to the folder of the sweep. When its worker or its node is lost, the
group is submitted again, with the newest checkpoint that has arrived; Ray's own retries would begin
with what the task was first given.
"""

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from lab.files import RunError, explain_write_errors, shorten_message
from lab.sweeps.folder import CellFolder
from lab.sweeps.parcels import Delivery, Files, pack, receive
from lab.sweeps.remote import train_elsewhere
from lab.sweeps.workers import POLL, Death, Trainer

CHECK = 5.0
"""Seconds between two looks whether the head node answers."""
PATIENCE = 10.0
"""Seconds that it has to answer, and a task to end once it is cancelled."""
Claim = Callable[[CellFolder], AbstractContextManager[Any]]


def knock(address: str) -> None:
    """Check that something listens at an address.

    Raises:
        ValueError: for an address that is not HOST:PORT.
        OSError: when nothing listens there.
        OverflowError: for a port that does not exist.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise ValueError(f"{address}: must be HOST:PORT")
    socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE).close()


class Cluster:
    """A Ray cluster that this process is connected to.

    Args:
        address: as the user gave it.
    """

    def __init__(self, address: str):
        import ray

        self.head, found = ray.get_runtime_context().gcs_address, ray.cluster_resources()
        self.cpus, self.gpus = int(found.get("CPU", 0)), int(found.get("GPU", 0))
        if not self.cpus:
            raise ValueError(f"ray={address}: its nodes have no CPUs; start them with --num-cpus")

    def start(
        self,
        command: Sequence[str],
        claim: Claim,
        workers: int,
        stop: threading.Event,
        *,
        gpus: bool = True,
    ) -> Sequence[Trainer]:
        """Return as many trainers, each with one task at a time.

        Args:
            command: the options of Python for a process that trains cells.
            claim: locks a cell's run at home, and writes its configuration.
            workers: how many.
            stop: set when the sweep is to end.
            gpus: whether tasks share the cluster's GPUs, if it has any.
        """
        import ray

        share = 1 / math.ceil(workers / self.gpus) if gpus and self.gpus else 0
        options = {"num_cpus": 1, "num_gpus": share, "max_retries": 0, "num_returns": "streaming"}
        task = ray.remote(**options)(train_elsewhere)
        return [ClusterTrainer(self.head, task, command, claim, stop) for _ in range(workers)]


class ClusterTrainer(Trainer):
    """Trains cells by tasks of a Ray cluster.

    Args:
        head: HOST:PORT of the head node.
        task: `train_elsewhere`, as Ray's remote function.
        command: the options of Python for a process that trains cells.
        claim: locks a cell's run at home, and writes its configuration.
        stop: set when the sweep is to end.
    """

    def __init__(
        self,
        head: str,
        task: Any,
        command: Sequence[str],
        claim: Claim,
        stop: threading.Event,
    ):
        super().__init__(stop)
        self.head, self.task, self.command, self.claim = head, task, list(command), claim
        self._death = Death("its task of the cluster ended", again=False)

    def close(self) -> None:
        """Do nothing: a task ends with its cells."""

    def _ask(
        self, folders: Sequence[CellFolder], max_minutes: float | None
    ) -> Iterator[tuple[CellFolder, str | None]]:
        from ray.exceptions import RayError, RayTaskError

        by_name = {folder.path.name: folder for folder in folders}
        with ExitStack() as claimed:
            for folder in folders:
                claimed.enter_context(self.claim(folder))
            parcels = {name: pack(folder) for name, folder in by_name.items()}
            try:
                for delivery in self._run(parcels, max_minutes):
                    with explain_write_errors(folders[0].path.parent):
                        receive({by_name[name]: f for name, f in delivery.files.items()})
                    yield from ((by_name[name], error) for name, error in delivery.ended)
            except RayTaskError as error:
                self._death = Death(shorten_message(error.cause), again=False)
            except RayError as error:
                name = type(error).__name__
                self._death = Death(f"its worker of the cluster was lost ({name})", again=True)

    def _run(self, parcels: Mapping[str, Files], max_minutes: float | None) -> Iterator[Delivery]:
        """Yield what a task sends until it ends; cancel it when the sweep is to end before."""
        import ray

        self._check_head()
        stream, checked = self.task.remote(self.command, parcels, max_minutes), time.monotonic()
        try:
            while not self.stop.is_set():
                ready, _ = ray.wait([stream], timeout=POLL)
                if ready:
                    try:
                        delivery: Any = ray.get(next(stream))
                        yield delivery
                    except StopIteration:
                        return
                if time.monotonic() - checked > CHECK:
                    self._check_head()
                    checked = time.monotonic()
        finally:
            ray.cancel(stream)
            ray.wait([stream.completed()], timeout=PATIENCE)  # the task removes its folder first

    def _check_head(self) -> None:
        """Check that the head node still answers; Ray would end this process soon after.

        Raises:
            RunError: when it does not.
        """
        try:
            knock(self.head)
        except OSError as error:
            raise RunError(
                f"the cluster at {self.head} is gone; once it runs again, the same command goes on"
            ) from error

    def _end(self, left: Sequence[CellFolder]) -> Death:
        return self._death

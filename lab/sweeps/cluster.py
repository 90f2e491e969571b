"""Training cells on a Ray cluster: a task trains one run, in a temporary folder of its node.

It sends its folder home at each checkpoint and at the end, so machines need no disk in common. When
its worker or its node is lost, the run is submitted again with what has arrived; Ray's own retries
would begin with what the task was first given.
"""

import contextlib
import importlib.util
import logging
import math
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any, NamedTuple

from lab.files import RunError, explain_write_errors, lock, shorten_message, write
from lab.sweeps.outcome import LENGTHS, SPENT
from lab.sweeps.pool import POLL, CellRun, KilledError, LostClusterError, Worker
from lab.training.run import Run

Files = Mapping[str, bytes]
"""The content of files by their path below a run's folder."""
OF_HOME = ("config.json", SPENT)
"""What the sweep itself writes, so that nothing from elsewhere takes its place."""
RESULTS = ("result.json", LENGTHS)
CHECK = 2.0
"""Seconds between two looks whether the head node answers."""
PATIENCE = 10.0
"""Seconds that it has to answer, and a task to end once it is cancelled."""
LAST_WORDS = (
    "Error: this process was killed. If the cluster at {address} is gone, Ray did it: start the "
    "cluster again; the same command goes on"
)
"""Printed if Ray kills this process, as it does when the node is lost on which this runs."""
HERE = ("local", "auto")
"""Values of --ray besides addresses: a new cluster for this sweep, and the one of this machine."""
REFUSED = b"InvalidAuthToken"
"""Ray's word for a missing or wrong token, which its exception does not mention."""
SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # What Ray says about workers that it lost would go between the lines of the sweep.
    "RAY_BACKEND_LOG_LEVEL": "error",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "^",
}
"""Environment variables for Ray, unless the user has set them."""


class Delivery(NamedTuple):
    """What a task sends home: files that are new, whether the run has ended, and its error."""

    files: Files
    ended: bool = False
    error: str | None = None


def train_elsewhere(
    each: CellRun, files: Files, max_minutes: float | None
) -> Generator[Delivery, None, None]:
    """Train a run in a temporary folder; yield what is new at each checkpoint and at the end.

    Args:
        each: the run.
        files: of its folder at home.
        max_minutes: most minutes; None: no limit.

    Raises:
        KilledError: when the process that trains it was killed.
        OSError: when it cannot be started, or the disk is full.
    """
    worker = Worker(threading.Event())
    with TemporaryDirectory(prefix="lab-run-") as home, ThreadPoolExecutor(1) as pool:
        run = replace(each.run, path=Path(home, "run"))
        for name, content in files.items():
            (run.path / name).parent.mkdir(parents=True, exist_ok=True)
            write(run.path / name, content)
        sent, step = _stamp(run.path), max(run.list_checkpoints(), default=0)
        training = pool.submit(worker.train, replace(each, run=run), max_minutes)
        try:
            while not wait([training], POLL).done:
                newest = max(run.list_checkpoints(), default=0)
                if newest > step and (found := _read_news(run, sent, newest)):
                    yield Delivery(found)
                    step = newest
            error = training.result()
            yield Delivery(_read_news(run, sent, None), True, error)
        finally:
            worker.stop.set()
            wait([training])
            worker.close()


def pack(run: Run) -> Files:
    """Return all files of a run's folder."""
    return {name: (run.path / name).read_bytes() for name in _stamp(run.path)}


def _stamp(folder: Path) -> dict[str, tuple[int, int]]:
    """Return what tells versions of a file apart, by name; without files that are being written."""
    stamps = {}
    for file in folder.rglob("*"):
        name = file.relative_to(folder)
        with contextlib.suppress(FileNotFoundError):  # it was replaced meanwhile
            own = file.is_file() and not file.is_symlink()
            if own and not any(part.startswith(".") for part in name.parts):
                stamps[name.as_posix()] = file.stat().st_mtime_ns, file.stat().st_size
    return stamps


def _read_news(run: Run, sent: dict[str, tuple[int, int]], step: int | None) -> dict[str, bytes]:
    """Return what has changed: up to a checkpoint, or all. Empty if the checkpoint vanishes."""
    files, stamps = {}, _stamp(run.path)
    for name, stamp in stamps.items():
        parts = Path(name).parts
        other = parts[0] == "checkpoint" and parts[1] != f"step-{step:08d}" if step else False
        if not other and sent.get(name) != stamp:
            with contextlib.suppress(FileNotFoundError):
                files[name] = (run.path / name).read_bytes()
    if step is not None:
        if step not in run.list_checkpoints():
            return {}
        # Later rows belong to later checkpoints.
        lines = files.get("metrics.jsonl", b"").splitlines(keepends=True)
        files["metrics.jsonl"] = b"".join(lines[:step])
        stamps.pop("metrics.jsonl", None)
    sent |= {name: stamps[name] for name in files if name in stamps}
    return files


def receive(run: Run, files: Files) -> None:
    """Write what has arrived, such that a sweep that is killed meanwhile goes on from it.

    A checkpoint needs the metrics up to it, and a result the last checkpoint.

    Raises:
        RunError: when something cannot be written, or is not to be.
    """
    for name in files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise RunError(f"{run.path}: {name!r} is not below it")
    kept = {name for name in files if name.startswith("checkpoint/")}
    with explain_write_errors(run.path):
        for name in sorted(files.keys() - {*kept, *OF_HOME, *RESULTS}):
            (run.path / name).parent.mkdir(exist_ok=True)
            write(run.path / name, files[name])
        for folder in sorted({run.path / Path(name).parent for name in kept}):
            temporary = folder.with_name(f".{folder.name}.writing")
            if not folder.exists():
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
                for name in kept:
                    if run.path / Path(name).parent == folder:
                        write(temporary / Path(name).name, files[name])
                temporary.rename(folder)
        for name in sorted(files.keys() & {*RESULTS}):
            write(run.path / name, files[name])
    *older, _ = [*run.list_checkpoints().values()] or [None]
    for folder in filter(None, older):
        shutil.rmtree(folder, ignore_errors=True)


class ClusterWorker(Worker):
    """Trains runs by tasks of a Ray cluster, one at a time, in place of a process of this machine.

    Args:
        stop: set when the sweep is to end.
        head: HOST:PORT of the head node.
        task: `train_elsewhere`, as Ray's remote function.
    """

    def __init__(self, stop: threading.Event, head: str, task: Any):
        super().__init__(stop)
        self.head, self.task = head, task

    def train(self, each: CellRun, max_minutes: float | None) -> str | None:
        """Train a run by a task, as `Worker.train` says."""
        from ray.exceptions import RayError, RayTaskError

        with lock(each.run.path):
            try:
                for delivery in self._submit(each, max_minutes):
                    receive(each.run, delivery.files)
                    if delivery.ended:
                        return delivery.error
            except RayTaskError as error:
                if isinstance(error.cause, KilledError):
                    raise KilledError(str(error.cause)) from error
                return shorten_message(error.cause)
            except RayError as error:
                name = type(error).__name__
                raise KilledError(f"its worker of the cluster was lost ({name})") from error
        return None if self.stop.is_set() else "its task of the cluster ended"

    def _submit(self, each: CellRun, max_minutes: float | None) -> Iterator[Delivery]:
        """Yield what a task sends until it ends; cancel it when the sweep is to end before."""
        import ray

        self._check_head()
        stream = self.task.remote(each, pack(each.run), max_minutes)
        checked = time.monotonic()
        try:
            while not self.stop.is_set():
                if ray.wait([stream], timeout=POLL)[0]:
                    try:
                        delivery: Any = ray.get(next(stream), timeout=PATIENCE)
                    except StopIteration:
                        return
                    yield delivery
                if time.monotonic() - checked > CHECK:
                    self._check_head()
                    checked = time.monotonic()
        finally:
            ray.cancel(stream)
            ray.wait([stream.completed()], timeout=PATIENCE)  # the task removes its folder first

    def _check_head(self) -> None:
        """Check that the head node still answers; Ray would end this process soon after.

        Raises:
            LostClusterError: when it does not.
        """
        try:
            knock(self.head)
        except OSError as error:
            raise LostClusterError(
                f"the cluster at {self.head} is gone; once it runs again, the same command goes on"
            ) from error


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


@contextmanager
def connect(address: str) -> Iterator[int]:
    """Connect this process to a cluster for a `with` block; yields how many CPUs it has.

    Args:
        address: HOST:PORT of its head; or as Ray has it, "auto" for one that runs on this machine,
            "local" for a new one on it that ends with the block and listens on loopback only.

    Raises:
        ValueError: without Ray, when no cluster answers there, it refuses the token, or has no CPU.
    """
    if importlib.util.find_spec("ray") is None:
        raise ValueError(
            f"ray={address}: needs Ray, which is not installed: pip install 'ray>=2.52' (or the "
            "extra wonderful-lab[cluster])"
        )
    try:
        if address not in HERE:
            knock(address)  # Ray would wait for half a minute
    except ValueError as error:
        raise ValueError(
            f"ray={address}: must be HOST:PORT of the head node, auto, or local; run the command "
            "on a node of the cluster"
        ) from error
    except (OSError, OverflowError) as error:
        raise ValueError(f"ray={address}: no cluster answers there: {error}") from error
    for name, value in SETTINGS.items():  # before Ray is imported, which reads them
        os.environ.setdefault(name, value)
    if address == "local":
        # Ray's name for: the address of this node is that of its loopback interface.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray
    from ray.exceptions import AuthenticationError

    with TemporaryFile() as heard:
        try:
            with _divert_errors(heard):
                ray.init(
                    address,
                    include_dashboard=False if address == "local" else None,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
        except (AuthenticationError, ConnectionError, RuntimeError, ValueError) as error:
            heard.seek(0)
            said = shorten_message(error)
            if isinstance(error, AuthenticationError) or REFUSED in heard.read():
                said = (
                    "the cluster wants another token than that of RAY_AUTH_TOKEN, of the file "
                    "RAY_AUTH_TOKEN_PATH or of ~/.ray/auth_token"
                )
            elif isinstance(error, ConnectionError):
                said = f"no cluster answers there: {said}"
            raise ValueError(f"ray={address}: {said}") from error
    try:
        cpus = int(ray.cluster_resources().get("CPU", 0))
        if not cpus:
            raise ValueError(f"ray={address}: its nodes have no CPUs; start them with --num-cpus")
        with _say_if_killed(LAST_WORDS.format(address=address)):
            yield cpus
    finally:
        ray.shutdown()


def open_cluster_workers(count: int, stop: threading.Event, *, gpus: bool) -> list[Worker]:
    """Return workers of the cluster that this process is connected to.

    Args:
        count: how many.
        stop: set when the sweep is to end.
        gpus: whether they share the cluster's GPUs, if it has any.
    """
    import ray

    found = int(ray.cluster_resources().get("GPU", 0)) if gpus else 0
    share = 1 / math.ceil(count / found) if found else 0
    options = {"num_cpus": 1, "num_gpus": share, "max_retries": 0, "num_returns": "streaming"}
    head, task = ray.get_runtime_context().gcs_address, ray.remote(**options)(train_elsewhere)
    return [ClusterWorker(stop, head, task) for _ in range(count)]


@contextmanager
def _say_if_killed(line: str) -> Iterator[None]:
    """Have a line printed on stderr if this process ends inside a `with` block.

    By a shell that is no child of it, since Ray kills those, and in a session of its own, where
    Ctrl-C in a terminal does not reach it.
    """
    wait = 'exec 3<&0; (read word <&3 || echo "$0" >&2) &'
    command = ["sh", "-c", wait, line]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as shell:
        shell.wait()  # it has started another
        assert shell.stdin is not None
        try:
            yield
        finally:
            with contextlib.suppress(BrokenPipeError):
                shell.stdin.write(b"ended\n")
                shell.stdin.flush()


@contextmanager
def _divert_errors(file: IO[bytes]) -> Iterator[None]:
    """Write what Ray's own processes and threads print on stderr to a file, for a `with` block."""
    sys.stderr.flush()
    before = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)

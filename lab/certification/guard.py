"""The process between `lab certify` and the worker: it ends all that the target has started.

`python -m lab.certification.guard GIB FD` passes the line on its standard input to the worker,
whose verdicts go to the file descriptor. It runs no code of the target, so nothing can keep it from
noticing that its parent has ended (its standard input closes), or that the worker and its
descendants, also those in sessions of their own, together take too much memory. Then it kills them
all.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Options of Linux's prctl."""
INTERVAL = 0.25
"""Seconds between two looks at the memory."""
PATIENCE = 10.0
"""Seconds after which a process that does not end is left."""
WORKER = "lab.certification.worker"
TOO_MUCH = 97
"""Exit code where too much memory was taken."""
PROCESSES = Path("/proc")
MARK = "LAB_CERTIFY"
"""Environment variable of the guard and of all that it starts, by which they are found. A target
may certify another one, so it holds the marks of all guards above, one after the other."""


def main(gibibytes: float, channel: int) -> None:
    """Run the worker until it or the parent ends, or memory is full."""
    _control(PR_SET_CHILD_SUBREAPER, 1)  # what loses its parent becomes a child of this process
    request = sys.stdin.buffer.readline()
    worker = subprocess.Popen(
        [sys.executable, "-P", "-m", WORKER, str(channel)],
        stdin=subprocess.PIPE,
        pass_fds=(channel,),
        start_new_session=True,
    )
    os.close(channel)
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        worker.stdin.write(request)
        worker.stdin.flush()
    code = None
    while code is None:
        ready, _, _ = select.select([0], [], [], INTERVAL)
        if ready and not os.read(0, 1):
            code = -signal.SIGKILL
        elif measure_memory(list_descendants()) > gibibytes * 2**30:
            print(f"used more than {gibibytes:.3g} GiB, with all its processes", file=sys.stderr)
            code = TOO_MUCH
        else:
            code = worker.poll()
    kill_descendants()
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


def kill_descendants() -> None:
    """Kill all processes below this one; again, until none has been started in the meantime."""
    while found := list_descendants():
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def add_mark(mark: str) -> dict[str, str]:
    """Return this process's environment with one more mark."""
    return {**os.environ, MARK: " ".join(filter(None, (os.environ.get(MARK), mark)))}


def kill_marked(mark: str) -> None:
    """Kill all processes that have inherited a mark, again until there are none.

    So nothing outlives a guard that the target has killed. Those that have replaced their
    environment are not found, and those that the system does not end are left after `PATIENCE`.
    """
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and (
        found := [each for each, _, state in _list_processes() if state != "Z" and _has(each, mark)]
    ):
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(INTERVAL / 10)


def _has(process: int, mark: str) -> bool:
    with contextlib.suppress(OSError):
        variables = (PROCESSES / str(process) / "environ").read_bytes().split(b"\0")
        held = [each for each in variables if each.startswith(f"{MARK}=".encode())]
        return any(mark.encode() in each.partition(b"=")[2].split() for each in held)
    return False


def list_descendants() -> list[int]:
    """Return the numbers of all processes below this one, those that have ended left out."""
    children: dict[int, list[int]] = {}
    for process, parent, state in _list_processes():
        if state != "Z":
            children.setdefault(parent, []).append(process)
    found, new = [], [os.getpid()]
    while new:
        new = [child for process in new for child in children.get(process, [])]
        found += new
    return found


def measure_memory(processes: list[int]) -> int:
    """Return the bytes that processes take together; what they share counts once."""
    own = shared = 0
    files: dict[tuple[int, int], int] = {}
    for process in processes:
        with contextlib.suppress(OSError, ValueError):
            for line in (PROCESSES / str(process) / "smaps_rollup").read_text().splitlines():
                name, _, value = line.partition(":")
                own += int(value.split()[0]) * 1024 if name == "Pss_Anon" else 0
                shared += int(value.split()[0]) * 1024 if name == "Pss_Shmem" else 0
        for key, size in _list_shared_files(process):
            files[key] = size
    return own + max(shared, sum(files.values()))


def _list_shared_files(process: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield the files in memory that a process has open, with their bytes."""
    folder = PROCESSES / str(process) / "fd"
    with contextlib.suppress(OSError):
        for each in os.listdir(folder):
            with contextlib.suppress(OSError):
                if os.readlink(folder / each).startswith(("/memfd:", "/dev/shm/")):
                    found = os.stat(folder / each)
                    yield (found.st_dev, found.st_ino), found.st_blocks * 512


def _list_processes() -> Iterator[tuple[int, int, str]]:
    """Yield the number, the parent and the state of each process."""
    for each in os.listdir(PROCESSES):
        if each.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # The name before may hold spaces and brackets.
                rest = (PROCESSES / each / "stat").read_text().rpartition(")")[2].split()
                yield int(each), int(rest[1]), rest[0]


def end_with_parent() -> None:
    """Have the system kill this process when its parent ends."""
    _control(PR_SET_PDEATHSIG, signal.SIGKILL)


def _control(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))

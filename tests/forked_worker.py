"""The process of a sweep's worker, forked: one that is started imports torch and the lab first."""

import os
import threading
from multiprocessing.connection import Connection, wait
from pathlib import Path

from lab.sweeps.pool import ONE_THREAD, Worker
from tests.brief import behave_as_in_tests
from tests.forkserver import connect_server

ONE_AT_A_TIME = threading.Lock()
"""A start looks at the ends of all processes before, which can be read only once."""


class ForkedProcess:
    """What a worker asks of `subprocess.Popen`.

    Args:
        log: the file that it writes its errors to.
        environment: its environment variables.
    """

    def __init__(self, log: Path, environment: dict[str, str]):
        (orders, to_it), (from_it, answers) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(to_it, "wb"), os.fdopen(from_it, "rb")
        ends = Connection(orders, writable=False), Connection(answers, readable=False)
        arguments = (*ends, log.absolute(), environment)
        self._process = connect_server().Process(target=_serve, args=arguments, daemon=True)
        with ONE_AT_A_TIME:
            self._process.start()
        self.pid = self._process.pid
        for end in ends:
            end.close()

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self) -> int:
        wait([self._process.sentinel])
        with ONE_AT_A_TIME:
            self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def start(worker: Worker, log: Path) -> ForkedProcess:
    """Fork what `Worker._start` starts."""
    return ForkedProcess(log, {**os.environ, **ONE_THREAD, **worker.variables})


def _serve(orders: Connection, answers: Connection, log: Path, environment: dict[str, str]) -> None:
    from lab.sweeps.pool import serve

    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    behave_as_in_tests()
    with open(log, "a") as output:
        for number, end in enumerate((orders, answers, output)):
            os.dup2(end.fileno(), number)
    serve()

"""Waits for a processor do not count as a process's own time."""

import os
import subprocess
import sys
import time

import pytest

from lab.certification import deadline
from lab.certification.deadline import Deadline, read_waiting

SPIN = "while True: pass"


def test_waits_for_a_processor_do_not_count(monkeypatch: pytest.MonkeyPatch):
    now, waited = 0.0, 0.0
    monkeypatch.setattr(deadline, "read_waiting", lambda _: waited)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    patience = Deadline(4, process=1)
    now = 3.0
    assert patience.count_left() == 1
    now, waited = 8.0, 6.0
    assert patience.count_left() == 2
    now, waited = 41.0, 40.0  # far out, the clock decides
    assert patience.count_left() == -1


def test_the_system_says_how_long_a_process_waited():
    core = min(os.sched_getaffinity(0))
    spinning = [subprocess.Popen([sys.executable, "-S", "-c", SPIN]) for _ in range(2)]
    try:
        for process in spinning:
            os.sched_setaffinity(process.pid, {core})
        until = time.monotonic() + 20
        while read_waiting(spinning[0].pid) < 0.05 and time.monotonic() < until:
            time.sleep(0.05)
        assert read_waiting(spinning[0].pid) >= 0.05
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    assert read_waiting(spinning[0].pid) == 0

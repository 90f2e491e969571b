"""The time limit of a law, and the numbers of a certificate."""

import os
import subprocess
import sys
import time

from lab.certification import _encode_number, _read_clock

SPIN = "while True: pass"


def test_waits_for_a_processor_do_not_count():
    core = min(os.sched_getaffinity(0))
    spinning = [subprocess.Popen([sys.executable, "-S", "-c", SPIN]) for _ in range(2)]
    try:
        for process in spinning:
            os.sched_setaffinity(process.pid, {core})
        began = time.monotonic() - _read_clock(spinning[0].pid)
        until, waited = time.monotonic() + 20, 0.0
        while waited < 0.05 and time.monotonic() < until:
            time.sleep(0.05)
            waited = time.monotonic() - _read_clock(spinning[0].pid) - began
        assert waited >= 0.05
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    before = time.monotonic()
    assert before <= _read_clock(spinning[0].pid) <= time.monotonic()


def test_numbers_beyond_json_are_text():
    numbers = [0, 2.5, None, float("inf"), float("-inf"), float("nan")]
    found = [_encode_number(number) for number in numbers]
    assert found == [0, 2.5, None, "Infinity", "-Infinity", "NaN"]
    assert float(str(found[3])) == float("inf")

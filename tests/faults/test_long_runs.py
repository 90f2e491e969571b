"""Long runs and many resumes: memory and descriptors stay level, and the clock may be set back."""

import os
import time
from pathlib import Path

from lab.config import Runtime
from lab.training.experiment import carry_out
from lab.training.run import Run
from tests.faults.planted import describe

MANY = int(os.environ.get("FAULTS", "3"))
"""Resumes; `make faults` takes thousands."""
GROWTH = 32 * 2**20
"""Bytes by which a process may grow after it has warmed up."""
MOST_RESUMES = 1_000


def measure_process() -> tuple[int, int]:
    """Return the bytes that this process holds, and how many descriptors."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))


def test_many_resumes_leave_nothing_behind(tmp_path, monkeypatch):
    resumes = min(MANY, MOST_RESUMES)
    run = describe(tmp_path / "run", max_steps=resumes + 4)
    run.claim()
    for _ in range(2):
        carry_out(Run.open(run.path), Runtime(device="cpu", threads=1, max_minutes=1e-9))
    size, descriptors = measure_process()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 10**6)  # somebody sets the clock back
    for number in range(resumes):
        result = carry_out(Run.open(run.path), Runtime(device="cpu", threads=1, max_minutes=1e-9))
        assert (result["stopped"], result["steps"]) == ("interrupted", number + 3)
    after = measure_process()
    assert after[0] - size < GROWTH
    assert after[1] == descriptors
    assert len(list((run.path / "checkpoint").iterdir())) == 1
    assert [row["step"] for row in run.read_metrics()] == list(range(1, resumes + 3))


def test_a_clock_that_is_set_back_or_forward_changes_no_limit(tmp_path, monkeypatch):
    for name, hours in ("back", -1), ("forward", 1):
        now = [time.time()]

        def jump(now: list[float] = now, hours: int = hours) -> float:
            now[0] += 3600 * hours
            return now[0]

        monkeypatch.setattr(time, "time", jump)
        run, began = describe(tmp_path / name, max_steps=10**6, eval_every=10**6), time.monotonic()
        result = carry_out(run, Runtime(device="cpu", threads=1, max_minutes=0.005))
        assert (result["stopped"], result["signal"]) == ("interrupted", None)
        assert time.monotonic() - began >= 0.3
        assert result["steps"] > 1

"""When a process has had its time, however much of it other programs took."""

import time

from lab.certification.guard import PROCESSES

FAR = 10
"""Maximum wall time, as a multiple of the seconds that the process may take."""


class Deadline:
    """The time that a process has left.

    Waits for a processor do not count, because a law that other programs slow down would be stopped
    before it is decided. Sleep counts, so a process that hangs is stopped in time.

    Args:
        seconds: that the process may take.
        process: its number; 0 if it is not known, and then every second counts.
    """

    def __init__(self, seconds: int | float, process: int):
        self._seconds, self._process = seconds, process
        self._began, self._waited = time.monotonic(), read_waiting(process)

    def count_left(self) -> float:
        """Return the seconds left, below 0 once the time is over."""
        waited = min(read_waiting(self._process) - self._waited, (FAR - 1) * self._seconds)
        return self._began + self._seconds + waited - time.monotonic()


def read_waiting(process: int) -> float:
    """Return the seconds for which a process was ready to run but had no processor.

    Only its first thread counts; 0 where the system does not say.
    """
    try:
        return int((PROCESSES / str(process) / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0

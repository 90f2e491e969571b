"""Ending a run between two steps when the system asks for it."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def catch_interrupts() -> Iterator[Callable[[], signal.Signals | None]]:
    """Hold back SIGINT and SIGTERM; yields a function that returns the one that came, if any.

    A second signal acts as it would without this.
    """
    caught: list[signal.Signals] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(signal.Signals(number))
        signal.signal(number, before[caught[-1]])

    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: caught[0] if caught else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

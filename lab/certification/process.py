"""One target before the laws, in a process of its own, which may hang, die, or want all memory.

Nothing here imports torch: the child does (`lab.certification.worker`). It says in lines of JSON,
over a pipe that the target does not know, what it has decided; a law that takes too long or kills
the child is not decided, and another child goes on with those that are left.
"""

import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

START_SECONDS = 120
"""Most that the imports may take, torch's and then the target's: disks are slow when cold."""
END_SECONDS = 10
"""Most that a child may take to end, once it has closed its pipe."""
SAID = 4096
"""Bytes kept of what a child says on its standard error."""
WORKER = "lab.certification.worker"

Certificate = dict[str, Any]
"""target, notes, lengths, d_model, seconds, laws: as JSON takes it, numbers beyond it as text."""

OUTCOMES = {
    "holds": ("holds", "hold"),
    "fails": ("fails", "fail"),
    "not applicable": ("not applicable", "not applicable"),
    "not decided": ("not decided", "not decided"),
}
"""What may be said of a law, as it is said of one, and of several."""

SIGNS = {"holds": "✓", "fails": "✗", "not applicable": "–", "not decided": "?"}


@dataclass(frozen=True)
class Request:
    """What is asked of a child.

    Attributes:
        target: "package.module:factory".
        options: what the factory is called with, as typed.
        calling: how the target is called: `lab.laws.adapters.adapt`'s options.
        d_model: width of inputs; None where it is to be found.
        lengths: of the probes; None for the usual ones.
        batch: rows of a probe.
        seed: of weights and probes.
        only: names of laws; None for all.
        quick: whether to try less.
        compiler: torch.compile's backend; None compiles nothing.
        device: where to try the target.
        memory: most that the child may take, GiB.
        seconds: most that a law may take before it is stopped.
    """

    target: str
    options: dict[str, str]
    calling: dict[str, Any]
    d_model: int | None
    lengths: list[int] | None
    batch: int
    seed: int
    only: list[str] | None
    quick: bool
    compiler: str | None
    device: str
    memory: int | float
    seconds: int | float


class RefusedError(ValueError):
    """A target cannot be examined at all; the message says why."""


class _StoppedError(Exception):
    """A child said nothing for too long, or has ended; the message says which."""


def examined(
    request: Request,
    on_recognised: Callable[[Certificate], None],
    on_begin: Callable[[str, int], None],
    on_verdict: Callable[[Certificate], None],
) -> Certificate:
    """Return a target's certificate.

    Args:
        request: what to examine, and how.
        on_recognised: told the notes, lengths, width and names of the laws, before the first.
        on_begin: told each law and its number, from 0.
        on_verdict: told each entry of the certificate's laws once it is decided.

    Raises:
        RefusedError: where it cannot be imported, made or called, or dies or hangs before any law.
    """
    began = time.monotonic()
    decided: list[Certificate] = []
    child = _Child(request)
    try:
        found = child.recognised()
        laws = found["laws"]
        on_recognised(found)
        why = ""
        for number, law in enumerate(laws):
            on_begin(law, number)
            if not child.runs and not why:
                child = _Child(replace(request, only=laws[number:]))
                try:
                    child.recognised()
                except RefusedError as error:
                    why = f"before it, in another process: {error}"
            verdict = _undecided(law, why) if why else _judged(child, law, request.seconds)
            decided.append(verdict)
            on_verdict(verdict)
    finally:
        child.kill()
    seconds = round(time.monotonic() - began, 1)
    named = {name: found[name] for name in ("notes", "lengths", "d_model")}
    return {"target": request.target, **named, "seconds": seconds, "laws": decided}


def counted(certificate: Certificate) -> str:
    """Return how many laws had which outcome: "10 hold, 1 fails"."""
    counts = Counter(law["verdict"] for law in certificate["laws"])
    return ", ".join(
        f"{counts[outcome]} {words[counts[outcome] > 1]}"
        for outcome, words in OUTCOMES.items()
        if counts[outcome]
    )


def _judged(child: "_Child", law: str, seconds: int | float) -> Certificate:
    try:
        verdict = child.told(seconds)
    except _StoppedError as error:
        child.kill()
        return _undecided(law, str(error))
    if verdict.get("law") != law:
        # A child of the target's own, which speaks with its voice.
        child.kill()
        return _undecided(law, "the target's own process answered for it")
    numbers = {name: _number(verdict[name]) for name in ("measured", "allowed")}
    return {**verdict, **numbers}


def _undecided(law: str, why: str) -> Certificate:
    nothing = dict.fromkeys(("counterexample", "measured", "allowed", "snippet", "where"))
    return {"law": law, "verdict": "not decided", "evidence": why, **nothing, "left": ""}


def _number(value: int | float | None) -> int | float | str | None:
    """Return a number as JSON takes it: "NaN", "Infinity", "-Infinity" are text."""
    return value if value is None or math.isfinite(value) else json.dumps(value)


class _Child:
    """A process with a target in it, and what it says."""

    def __init__(self, request: Request):
        self._request = request
        events, theirs = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", WORKER, str(theirs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(theirs,),
            # The target's own children end with it, and a Ctrl-C is the parent's to answer.
            start_new_session=True,
        )
        os.close(theirs)
        assert self._process.stdin is not None
        assert self._process.stderr is not None
        self._events, self._error = events, self._process.stderr.fileno()
        self._heard, self._said = b"", b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._events, selectors.EVENT_READ)
        self._selector.register(self._error, selectors.EVENT_READ)
        self.runs = True
        # Left open: the child ends when it closes, whatever ended this process.
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(asdict(request)).encode() + b"\n")
            self._process.stdin.flush()

    def recognised(self) -> Certificate:
        """Return what the child found out of the target.

        Raises:
            RefusedError: where it found that there is nothing to examine, or did not come so far.
        """
        message: Certificate = {}
        for doing, seconds in (
            ("starting", START_SECONDS),
            ("importing it", START_SECONDS),
            ("probing it", self._request.seconds),
        ):
            try:
                message = self.told(seconds)
            except _StoppedError as error:
                self.kill()
                raise RefusedError(f"target={self._request.target}, {doing}: {error}") from error
            if "refused" in message:
                self.kill()
                raise RefusedError(message["refused"])
        return message

    def told(self, seconds: int | float) -> Certificate:
        """Return the child's next message.

        Raises:
            _StoppedError: when it ends before, or takes longer than so many seconds.
        """
        deadline = time.monotonic() + seconds
        while b"\n" not in self._heard:
            left = deadline - time.monotonic()
            # What has forked keeps the pipe open behind it.
            if self._process.poll() is not None and left <= 0:
                raise _StoppedError(self._end())
            if left <= 0:
                raise _StoppedError(f"took longer than {seconds:g} s and was stopped")
            self._hear(left)
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)

    def kill(self) -> None:
        """End the child, and whatever it has started."""
        if not self.runs:
            return
        self.runs = False
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._selector.close()
        os.close(self._events)
        for pipe in (self._process.stdin, self._process.stderr):
            with suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]

    def _hear(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            data = os.read(key.fd, 2**16)
            if key.fd == self._error:
                self._said = (self._said + data)[-SAID:]
                if not data:
                    self._selector.unregister(key.fd)
            elif data:
                self._heard += data
            else:
                raise _StoppedError(self._end())

    def _end(self) -> str:
        """Return how the process ended, in words."""
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "the process closed its pipe"
        if code == -signal.SIGKILL:
            return "the process was killed (SIGKILL), as by a machine that has no memory left"
        if code < 0:
            return f"the process died with signal {signal.Signals(-code).name}"
        last = self._said.decode(errors="replace").strip().rpartition("\n")[2]
        return f"the process ended with code {code}" + (f": {last}" if last else "")

"""Certifying a module in a process of its own, so that a crash or a hang stops only that process.

The parent imports no torch. A law that takes too long or ends the child is not decided, and another
child tries the remaining laws. The child, `python -m lab.certification FD`, reads what to certify
from the connection FD and answers with dicts: one when it has started, one when the target is
imported, one with what it found by probing, then a verdict per law; or, at any time, why it cannot
go on.
"""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain, repeat
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from lab.certify_settings import CertifySettings
from lab.files import clean_all, describe_error, escape_controls, shorten_message

Certificate = dict[str, Any]
"""target, notes, lengths, d_model, seconds and laws; as JSON, with NaN and infinity as text."""
Messages = Generator[dict[str, Any], None, None]

OUTCOMES = {
    "holds": ("holds", "hold"),
    "fails": ("fails", "fail"),
    "not applicable": ("not applicable", "not applicable"),
    "not decided": ("not decided", "not decided"),
}
"""Each outcome in the singular and in the plural."""
SIGNS = {"holds": "✓", "fails": "✗", "not applicable": "–", "not decided": "?"}

GIBIBYTE = 2**30
START_SECONDS = 120
"""Maximum time to import torch, and then the target: cold disks are slow."""
END_SECONDS = 10
"""Maximum time that a child may take to end once it has closed its pipe."""
INTERVAL = 0.25
"""Seconds between two looks at whether the child still runs."""
CHILD = "lab.certification"


class RefusedError(ValueError):
    """A target cannot be certified at all; the message says why."""


class _StoppedError(Exception):
    """A child sent nothing for too long, or has ended; the message says which."""


def certify_in_child(
    target: str,
    settings: CertifySettings,
    memory: float,
    limit: float,
    on_recognised: Callable[[Certificate], None] = lambda found: None,
    on_begin: Callable[[str, int], None] = lambda law, number: None,
    on_verdict: Callable[[Certificate], None] = lambda law: None,
) -> Certificate:
    """Return a target's certificate.

    Args:
        target: "package.module:factory".
        settings: as for `certify`, but the device may be "auto".
        memory: most memory that each process of the target may take on a CPU, GiB.
        limit: seconds after which a law is stopped.
        on_recognised: called before the first law with the notes, lengths, width and names of laws.
        on_begin: called with each law and its number, from 0.
        on_verdict: called with each entry of the certificate's laws once it is decided.

    Raises:
        RefusedError: when the target cannot be imported, made or called, or when it crashes or
            hangs before any law.
    """
    began = time.monotonic()
    decided: list[Certificate] = []
    messages, found = _start(target, settings, memory, limit)
    laws, why = found["laws"], ""
    try:
        on_recognised(found)
        for number, law in enumerate(laws):
            on_begin(law, number)
            try:
                if messages is None and not why:
                    remaining = replace(settings, only=laws[number:])
                    messages, _ = _start(target, remaining, memory, limit)
                verdict = next(messages) if messages else _leave_undecided(law, why)
            except RefusedError as error:
                why = f"before it, in another process: {error}"
                verdict = _leave_undecided(law, why)
            except _StoppedError as error:
                messages = None
                verdict = _leave_undecided(law, str(error))
            numbers = {name: _encode_number(verdict[name]) for name in ("measured", "allowed")}
            decided.append({**verdict, **numbers})
            on_verdict(decided[-1])
    finally:
        if messages:
            messages.close()
    seconds = round(time.monotonic() - began, 1)
    kept = {name: found[name] for name in ("notes", "lengths", "d_model")}
    return {"target": target, **kept, "seconds": seconds, "laws": decided}


def count_outcomes(certificate: Certificate) -> str:
    """Say how many laws had which outcome: "10 hold, 1 fails"."""
    counts = Counter(law["verdict"] for law in certificate["laws"])
    return ", ".join(
        f"{counts[outcome]} {words[counts[outcome] > 1]}"
        for outcome, words in OUTCOMES.items()
        if counts[outcome]
    )


def _start(
    target: str, settings: CertifySettings, memory: float, limit: float
) -> tuple[Messages, dict[str, Any]]:
    """Start a child; return its verdicts to come, and what it found out about the target.

    Raises:
        RefusedError: when the target cannot be certified, or the child does not get that far.
    """
    messages, message = _run_child((target, settings, memory), limit), {}
    for doing in ("starting", "importing it", "probing it"):
        try:
            message = next(messages)
        except _StoppedError as error:
            raise RefusedError(f"target={target}, {doing}: {error}") from error
        if "refused" in message:
            messages.close()
            raise RefusedError(message["refused"])
    return messages, message


def _run_child(request: tuple[str, CertifySettings, float], limit: float) -> Messages:
    """Start a child and yield its messages; at the end, kill it and all that the target started.

    The child has a session of its own, to which processes of the target belong, too. Ctrl-C reaches
    only the parent.

    Raises:
        _StoppedError: when the child ends, or takes too long until its next message.
    """
    connection, theirs = Pipe()
    with connection, TemporaryFile() as errors:
        child = subprocess.Popen(
            # -P: no file in the working directory takes the place of one of the lab's packages.
            [sys.executable, "-P", "-m", CHILD, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        theirs.close()
        try:
            connection.send(request)
            for seconds in chain((START_SECONDS, START_SECONDS), repeat(limit)):
                yield clean_all(_receive(connection, child, seconds))
        except (EOFError, OSError) as error:
            raise _StoppedError(_describe_end(child, errors)) from error
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _receive(connection: Connection, child: subprocess.Popen, seconds: float) -> dict[str, Any]:
    """Return a child's next message.

    Raises:
        EOFError, OSError: when the child ends before.
        _StoppedError: when it takes longer than this.
    """
    end = _read_clock(child.pid) + seconds
    while True:
        # What the target has started may hold the pipe open after the child has ended.
        ended = child.poll() is not None
        if connection.poll(0 if ended else INTERVAL):
            return connection.recv()
        if ended:
            raise EOFError
        if _read_clock(child.pid) > end:
            raise _StoppedError(f"took longer than {seconds:g} s and was stopped")


def _read_clock(process: int) -> float:
    """Return the time in seconds, without what a process has waited for a processor (on Linux).

    A law that other programs slow down would be stopped before it is decided. Sleep counts, so a
    process that hangs is stopped in time. Only the process's first thread is looked at.
    """
    waited = 0
    with suppress(OSError):
        waited = int(Path(f"/proc/{process}/schedstat").read_text().split()[1])  # ns
    return time.monotonic() - waited / 1e9


def _describe_end(child: subprocess.Popen, errors: IO[bytes]) -> str:
    """Describe how a child ended, with the last line that it wrote to its standard error."""
    try:
        code = child.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        return "the process closed its pipe"
    if code == -signal.SIGKILL:
        return "the process was killed (SIGKILL), perhaps because memory ran out"
    if code < 0:
        return f"the process died with signal {signal.Signals(-code).name}"
    errors.seek(0)
    text = escape_controls(errors.read().decode(errors="replace"))
    last = text.strip().rpartition("\n")[2]
    return f"the process ended with code {code}" + (f": {last}" if last else "")


def _leave_undecided(law: str, why: str) -> Certificate:
    nothing = dict.fromkeys(("counterexample", "measured", "allowed", "snippet", "where"))
    empty = {"left": "", "note": "", "tokens": 0}
    return {"law": law, "verdict": "not decided", "evidence": why, **nothing, **empty}


def _encode_number(value: int | float | None) -> int | float | str | None:
    """Return a number that JSON can hold: "NaN", "Infinity" and "-Infinity" are text."""
    return value if value is None or math.isfinite(value) else json.dumps(value)


def main(connection: Connection) -> None:
    """Run as the child: receive what to certify, and send the verdicts."""
    target, settings, memory = connection.recv()
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    os.register_at_fork(after_in_child=connection.close)  # only this process answers
    connection.send({})
    from lab.laws.certification import Certification, select_laws
    from lab.laws.loading import load
    from lab.machine import choose_device

    try:
        laws = select_laws(settings.only)
        device = choose_device(settings.device)
        if device.type == "cpu":
            most = int(memory * GIBIBYTE)
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        load(target)
        connection.send({})
        certification = Certification(target, replace(settings, device=str(device)))
    # A user's module may raise anything, SystemExit too.
    except BaseException as error:
        explain = shorten_message if isinstance(error, ValueError) else describe_error
        connection.send({"refused": explain(error)})
        return
    found = {name: getattr(certification, name) for name in ("notes", "lengths", "d_model")}
    connection.send({**found, "laws": laws})
    for law in laws:
        try:
            verdict = asdict(certification.judge(law))
        except BaseException as error:
            verdict = _leave_undecided(law, f"raised {describe_error(error)}")
        connection.send(_blame_memory(verdict, memory))


def _blame_memory(verdict: Certificate, memory: float) -> Certificate:
    """Return a verdict that says so if the law is not decided because memory ran out."""
    from lab.machine import NO_MEMORY

    why = verdict["evidence"]
    if verdict["verdict"] != "not decided" or not any(
        w in why for w in (*NO_MEMORY, "MemoryError")
    ):
        return verdict
    return {**verdict, "evidence": f"used more than {memory:.3g} GiB: {why}"}


def _end_with_parent(connection: Connection) -> None:
    """End this process, and those that the target has started, when the parent ends."""
    connection.poll(None)  # the parent sends nothing more, so this waits for its end
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))

"""The child process of `lab.certification`, in which the target runs.

`python -m lab.certification.child FD` reads a request from the connection FD and answers with
dicts: one when it has started, one when the target is imported, one with what it found by probing,
then a verdict per law; or, at any time, why it cannot go on.
"""

import os
import resource
import signal
import sys
import threading
from dataclasses import asdict, replace
from multiprocessing.connection import Connection

from lab.certification import Request
from lab.files import describe_error, shorten_message
from lab.laws.certification import Certification, select_laws
from lab.laws.law import Verdict
from lab.laws.loading import load
from lab.machine import NO_MEMORY, choose_device

GIBIBYTE = 2**30


def main(connection: Connection) -> None:
    """Receive a request, certify its target, and send the verdicts."""
    request: Request = connection.recv()
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    os.register_at_fork(after_in_child=connection.close)  # only this process answers
    connection.send({})
    try:
        laws = select_laws(request.only)
        device = choose_device(request.settings.device)
        if device.type == "cpu":
            most = int(request.memory * GIBIBYTE)
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        load(request.target)
        connection.send({})
        settings = replace(request.settings, device=str(device))
        certification = Certification(request.target, settings)
    # A user's module may raise anything, SystemExit too.
    except BaseException as error:
        explain = shorten_message if isinstance(error, ValueError) else describe_error
        connection.send({"refused": explain(error)})
        return
    found = {name: getattr(certification, name) for name in ("notes", "lengths", "d_model")}
    connection.send({**found, "laws": laws})
    for law in laws:
        connection.send(asdict(_judge(certification, law, request.memory)))


def _judge(certification: Certification, law: str, memory: int | float) -> Verdict:
    try:
        verdict = certification.judge(law)
    except BaseException as error:
        verdict = Verdict(law, "not decided", f"raised {describe_error(error)}")
    undecided = verdict.verdict == "not decided"
    if undecided and any(words in verdict.evidence for words in (*NO_MEMORY, "MemoryError")):
        return replace(verdict, evidence=f"used more than {memory:.3g} GiB: {verdict.evidence}")
    return verdict


def _end_with_parent(connection: Connection) -> None:
    """End this process, and those that the target has started, when the parent ends."""
    connection.poll(None)  # the parent sends nothing more, so this waits for its end
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))

"""The child process of `lab.certification.process`, in which the target runs.

`python -m lab.certification.worker FD` reads a request from its standard input, one line of JSON,
and writes lines of JSON to the file descriptor: one when it has started, one when the target is
imported, one with what it found by probing, then a verdict per law; or, at any time, why it cannot
go on.
"""

import json
import os
import resource
import signal
import sys
import threading
from dataclasses import asdict, replace
from itertools import count
from typing import Any

from lab.certification.guard import end_with_parent
from lab.certification.request import KEY, Request, sign_frame
from lab.certify_settings import read_value
from lab.files import describe_error, shorten_message
from lab.laws.certification import Certification
from lab.laws.laws import select_laws
from lab.laws.loading import load
from lab.laws.verdict import Verdict
from lab.machine.device import choose_device

GIBIBYTE = 2**30
NO_MEMORY = ("can't allocate memory", "MemoryError", "bad_alloc", "Cannot allocate memory")


def main(channel: int) -> None:
    """Read a request, certify its target, and send the verdicts."""
    os.set_inheritable(channel, False)
    end_with_parent()
    asked = json.loads(sys.stdin.readline())
    key, numbers = asked.pop(KEY), count()
    request = Request.from_json(asked)
    _end_with_parent()
    with os.fdopen(channel, "w") as events:

        def send(message: dict[str, Any]) -> None:
            content = json.dumps(message)
            events.write(f"{sign_frame(key, next(numbers), content)} {content}\n")
            events.flush()

        send({"worker": os.getpid()})
        try:
            laws = select_laws(request.only)
            device = choose_device(request.settings.device)
            if device.type == "cpu":
                most = int(request.memory * GIBIBYTE)
                resource.setrlimit(resource.RLIMIT_DATA, (most, most))
            load(request.target)
            send({})
            options = {
                name: read_value(text) for name, text in (request.settings.options or {}).items()
            }
            settings = replace(request.settings, options=options, device=str(device))
            certification = Certification(request.target, settings)
        # A user's module may raise anything, SystemExit too.
        except BaseException as error:
            explain = shorten_message if isinstance(error, ValueError) else describe_error
            send({"refused": explain(error)})
            return
        send(
            {
                "notes": certification.notes,
                "lengths": certification.lengths,
                "d_model": certification.d_model,
                "laws": laws,
            }
        )
        for law in laws:
            send(asdict(_judge(certification, law, request.memory)))


def _judge(certification: Certification, law: str, memory: int | float) -> Verdict:
    try:
        verdict = certification.judge(law)
    except BaseException as error:
        words = f"raised {describe_error(error)}"
        verdict = Verdict(law, "not decided", words)
    undecided = verdict.verdict == "not decided"
    if undecided and any(words in verdict.evidence for words in NO_MEMORY):
        words = f"used more than {memory:.3g} GiB: {verdict.evidence}"
        return replace(verdict, evidence=words)
    return verdict


def _end_with_parent() -> None:
    """End when the parent closes the other end of standard input, which the target cannot read."""
    kept = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def wait() -> None:
        os.read(kept, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]))

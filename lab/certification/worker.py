"""The other side of `lab.certification.process`: a target examined here, told there.

`python -m lab.certification.worker FD` reads a request from its standard input, one line of JSON,
and writes lines of JSON to the file descriptor: one when it has started, one when the target is
imported, what it found by probing, then a verdict a law; or, at any time, why it cannot.
"""

import ast
import json
import os
import resource
import signal
import sys
import threading
from dataclasses import asdict, replace
from typing import Any

import torch

from lab.certification.process import Request
from lab.device import choose_device
from lab.files import shorten_message
from lab.laws.budget import QUICK, QUICK_LENGTHS, Budget
from lab.laws.examination import LAWS, Examination
from lab.laws.loading import load
from lab.laws.verdict import Verdict

GIBIBYTE = 2**30
SHARE = 8
"""A law is told to take this share of the time after which it is stopped, under each condition."""
NO_MEMORY = ("can't allocate memory", "MemoryError", "bad_alloc", "Cannot allocate memory")


def main(channel: int) -> None:
    """Read a request, examine its target, and tell."""
    os.set_inheritable(channel, False)
    request = Request(**json.loads(sys.stdin.readline()))
    _keep_input()
    with os.fdopen(channel, "w") as events:

        def tell(message: dict[str, Any]) -> None:
            events.write(json.dumps(message) + "\n")
            events.flush()

        tell({})
        try:
            laws = chosen(request.only)
            device = choose_device(request.device)
            if device.type == "cpu":
                most = int(request.memory * GIBIBYTE)
                resource.setrlimit(resource.RLIMIT_DATA, (most, most))
            load(request.target)
            tell({})
            examination = _examination(request, device)
        # A user's module may raise anything, SystemExit too.
        except BaseException as error:
            told = error if isinstance(error, ValueError) else ValueError(_named(error))
            tell({"refused": shorten_message(told)})
            return
        tell(
            {
                "notes": examination.notes,
                "lengths": examination.taken,
                "d_model": examination.width,
                "laws": laws,
            }
        )
        for law in laws:
            tell(asdict(_verdict(examination, law, request.memory)))


def chosen(only: list[str] | None) -> list[str]:
    """Return the laws asked for, in their order.

    Raises:
        ValueError: for an unknown one.
    """
    unknown = [law for law in only or () if law not in LAWS]
    if unknown:
        raise ValueError(f"only={unknown[0]}: must be among {', '.join(LAWS)}")
    return [law for law in LAWS if only is None or law in only]


def _examination(request: Request, device: torch.device) -> Examination:
    budget = QUICK if request.quick else Budget()
    seconds = min(budget.seconds, request.seconds / SHARE)
    return Examination(
        request.target,
        request.d_model,
        request.lengths or (QUICK_LENGTHS if request.quick else None),
        request.batch,
        request.seed,
        {name: _value(text) for name, text in request.options.items()},
        request.calling,
        replace(budget, seconds=seconds, compiler=request.compiler),
        device,
    )


def _verdict(examination: Examination, law: str, memory: int | float) -> Verdict:
    try:
        verdict = examination.verdict(law)
    except BaseException as error:
        words = shorten_message(RuntimeError(f"raised {_named(error)}"))
        verdict = Verdict(law, "not decided", words)
    undecided = verdict.verdict == "not decided"
    if undecided and any(words in verdict.evidence for words in NO_MEMORY):
        words = f"used more than {memory:.3g} GiB: {verdict.evidence}"
        return replace(verdict, evidence=words)
    return verdict


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _value(text: str) -> Any:
    """Read a Python literal; other text is itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _keep_input() -> None:
    """End with the parent, which holds the other end of the standard input; the target has none."""
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

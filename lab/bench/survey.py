"""A survey: certificates of many public modules, e.g. of every causal model of transformers.

`python -m lab.bench.survey FILE` adds a line of JSON to a file for each module that the file does
not have yet, so it can be stopped and started again. Each is tried in a process of its own, forked
from one that has imported the library, and stopped after some seconds of the processor. `--show`
describes and counts what a file has.
"""

import argparse
import gc
import json
import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lab.bench.survey_cases import FAMILIES, Case
from lab.certify_settings import QUICK, CertifySettings
from lab.laws.certification import Certification
from lab.laws.laws import LAWS, select_laws
from tasks.bounds import check_choice

GIBIBYTE = 2**30
MEMORY = 4 * GIBIBYTE
"""Maximum memory that a model may take."""
BRIEF = replace(QUICK, lengths=(2, 19), conditions=QUICK.conditions[:1])
"""Settings for hundreds of models: a length beyond the windows and chunks of small ones."""
EFFORTS: dict[str, tuple[CertifySettings, int]] = {
    "brief": (BRIEF, 60),
    "quick": (QUICK, 120),
    "usual": (replace(CertifySettings(), compiler="aot_eager"), 300),
}
"""Settings, and seconds of the processor after which a module is stopped."""
WALL = 10
"""A process may take ten times as long by the clock, where it waits for a processor."""
Line = dict[str, Any]


def certify_apart(
    target: str, settings: CertifySettings, seconds: int, laws: Sequence[str] = tuple(LAWS)
) -> Line:
    """Certify a target in a forked process, and return its verdicts until it ends or is stopped.

    Args:
        target: as for `certify`.
        settings: what to try it on.
        seconds: time of the processor after which the process is stopped.
        laws: names of the laws to try.

    Returns:
        A dict: `laws`, the verdicts, each with the CPU seconds until then; `notes`; `cpu`, CPU
        seconds; `refused`, why the target could not be built or called, or None; `ended`, how the
        process was stopped, or None if it ended by itself.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _certify_and_exit(target, settings, seconds, laws, write)
    os.close(write)
    with os.fdopen(read) as pipe:
        found = [json.loads(text) for text in pipe if text.endswith("\n")]
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    ended = signal.Signals(-code).name if code < 0 else f"exit code {code}" if code else None
    line: Line = {"target": target, "refused": None, "notes": [], "laws": []}
    for each in found:
        if "law" in each:
            line["laws"].append(each)
        else:
            line.update(each)
    return {**line, "ended": ended, "cpu": round(usage.ru_utime + usage.ru_stime, 1)}


def _certify_and_exit(
    target: str, settings: CertifySettings, seconds: int, laws: Sequence[str], write: int
) -> None:
    """Write the verdicts to a pipe, one in a line, and end the process."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    signal.alarm(WALL * seconds)
    code = 1
    with os.fdopen(write, "w", buffering=1) as pipe:
        try:
            certification = Certification(target, settings)
            pipe.write(json.dumps({"notes": certification.notes}) + "\n")
            for name in laws:
                law = {**asdict(certification.judge(name)), "cpu": round(time.process_time(), 1)}
                pipe.write(json.dumps(law) + "\n")
            code = 0
        # A foreign module may raise anything.
        except Exception as error:
            words = str(error) if isinstance(error, ValueError) else repr(error)
            pipe.write(json.dumps({"refused": words}) + "\n")
            code = 0
        finally:
            pipe.flush()
            # Neither handlers nor buffers of the parent's.
            os._exit(code)


def survey(
    path: Path,
    cases: Sequence[Case],
    settings: CertifySettings,
    seconds: int,
    on_line: Callable[[Line], None],
    laws: Sequence[str] = tuple(LAWS),
) -> None:
    """Certify the cases that a file does not have, and add a line for each.

    Args:
        path: the file.
        cases: what to certify.
        settings: what to try each on.
        seconds: time of the processor after which one is stopped.
        on_line: called with each line.
        laws: names of the laws to try.
    """
    done = {line["name"] for line in read(path)} if path.exists() else set()
    left = [case for case in cases if case.name not in done]
    if left:
        _import_all(settings, laws)
    for case in left:
        tried = replace(settings, options=case.options)
        line = {"name": case.name, **certify_apart(case.target, tried, seconds, laws)}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        on_line(line)


def _import_all(settings: CertifySettings, laws: Sequence[str]) -> None:
    """Import, once for all processes, what the laws import when they are first tried."""
    certification = Certification(nn.Linear(8, 8), replace(settings, d_model=8, options=None))
    for name in laws:
        certification.judge(name)
    gc.collect()
    gc.freeze()  # a forked process does not copy what a collection would touch


def select_cases(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """Return the cases that are named, in that order, or all without names.

    Raises:
        ValueError: for an unknown name.
    """
    known = {case.name: case for case in cases}
    for name in names:
        check_choice("name", name, known)
    return [known[name] for name in names or known]


def read(path: Path) -> list[Line]:
    """Return the lines of a file; one that was cut off while it was written is removed from it."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        path.write_bytes(whole)
    return [json.loads(text) for text in whole.splitlines()]


def describe(line: Line) -> str:
    """Describe a certificate in a line, and each law that fails in one more."""
    if line["refused"] is not None:
        return f"{line['name']}: not built: {line['refused'].partition(chr(10))[0]}"
    counts = Counter(law["verdict"] for law in line["laws"])
    words = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    ended = f", stopped by {line['ended']}" if line["ended"] else ""
    texts = [f"{line['name']}: {words}{ended}; {line['cpu']:.0f} CPU s"]
    texts += [
        f"  {law['law']} fails: {law['counterexample']}"
        for law in line["laws"]
        if law["verdict"] == "fails"
    ]
    return "\n".join(texts)


def summarize(lines: list[Line]) -> Iterator[str]:
    """Yield for how many modules each law holds, fails, and is not decided."""
    built = [line for line in lines if line["refused"] is None]
    yield f"{len(lines)} tried, {len(built)} built, {sum(x['cpu'] for x in lines):.0f} CPU s"
    failing = [x for x in built if any(law["verdict"] == "fails" for law in x["laws"])]
    yield f"{len(failing)} fail a law, {sum(bool(x['ended']) for x in built)} were stopped"
    for name in LAWS:
        counts = Counter(
            law["verdict"] for line in built for law in line["laws"] if law["law"] == name
        )
        yield f"{name}: " + ", ".join(f"{n} {outcome}" for outcome, n in counts.most_common())


def main() -> None:
    """Read the command line, and survey or count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*", help="only these, in this order")
    parser.add_argument("--of", choices=list(FAMILIES), default="transformers")
    parser.add_argument("--effort", choices=list(EFFORTS), default="quick")
    parser.add_argument("--only", action="append", choices=list(LAWS), help="may be repeated")
    parser.add_argument("--show", action="store_true")
    asked = parser.parse_intermixed_args()
    if asked.file.exists() != asked.file.is_file():
        parser.error(f"file={asked.file}: must be a file, and is none")
    if asked.show and not asked.file.exists():
        parser.error(f"file={asked.file}: there is no such file; a survey writes it")
    if asked.show:
        lines = read(asked.file)
        print("\n".join([*map(describe, lines), *summarize(lines)]))
        return
    torch.set_num_threads(1)
    settings, seconds = EFFORTS[asked.effort]
    survey(
        asked.file,
        select_cases(FAMILIES[asked.of](), asked.names),
        settings,
        seconds,
        lambda line: print(describe(line), flush=True),
        select_laws(asked.only),
    )


if __name__ == "__main__":
    main()

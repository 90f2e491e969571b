"""Break a copy of the sources in each way that mutants.toml lists: do the tests named there fail?

The process imports what the tests use of other packages once, and forks another for each mutant.
"""

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

HOME = Path(__file__).parents[2]
IMPORTED = ("torch", "numpy", "scipy.stats", "polars", "plotly.graph_objects", "pydantic", "typer")
SECONDS = 300
RAN, ELSEWHERE = 100, 99
"""Added to pytest's exit status, as 1 is also that of a crash; the status of tests that did not
import the file that is broken."""
PASSED, KILLED = RAN, RAN + 1
VERDICTS = {PASSED: "survived", KILLED: "killed", -9: "took too long", ELSEWHERE: "not imported"}


@dataclass(frozen=True)
class Mutant:
    """A fault: in `file`, `before` occurs once and becomes `after`; one of `tests` should fail."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


def read_mutants() -> list[Mutant]:
    """Return the mutants in the order of their file."""
    entries = tomllib.loads((HOME / "tests/mutants/mutants.toml").read_text("utf-8"))["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


@contextmanager
def plant(mutant: Mutant, copy: Path) -> Iterator[None]:
    """Break the copy for the length of a `with` block."""
    file = copy / mutant.file
    text, times = file.read_text("utf-8"), file.stat()
    file.write_text(text.replace(mutant.before, mutant.after), "utf-8")
    try:
        yield
    finally:
        file.write_text(text, "utf-8")
        # What was compiled of it is valid again.
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def run_tests(copy: Path, tests: Sequence[str], file: str | None = None) -> tuple[int, str]:
    """Run tests of the copy, which must import `file`, in a fork; return its status and output."""
    output = copy / "output.txt"
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=_exit_with_status, args=(copy, tests, file, output))
    process.start()
    process.join(SECONDS)
    process.kill()
    process.join()
    assert process.exitcode is not None
    return process.exitcode, output.read_text("utf-8", errors="replace")


def _exit_with_status(copy: Path, tests: Sequence[str], file: str | None, output: Path) -> None:
    import pytest

    with output.open("w") as written:
        os.dup2(written.fileno(), 1)
        os.dup2(written.fileno(), 2)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path.insert(0, str(copy))
    # Compiled files know their source by its time and size, which a mutant may share.
    sys.dont_write_bytecode = file is not None
    status = int(pytest.main(["-x", "-q", "--tb=line", "-p", "no:cacheprovider", *tests]))
    imported = {getattr(module, "__file__", None) for module in sys.modules.values()}
    sys.exit(RAN + status if str(copy / (file or "lab/__init__.py")) in imported else ELSEWHERE)


def main() -> None:
    """Print a line for each mutant; exit with 1 unless all are killed."""
    mutants, parser = read_mutants(), argparse.ArgumentParser(description=__doc__)
    names = [mutant.name for mutant in mutants]
    parser.add_argument("--only", choices=names, metavar="NAME", help="the name of one mutant")
    only = parser.parse_args().only
    mutants = [mutant for mutant in mutants if only in (None, mutant.name)]
    for name in IMPORTED:
        import_module(name)
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary).resolve()
        for name in ("lab", "tasks", "analysis", "tests"):
            shutil.copytree(HOME / name, copy / name)
        shutil.copy2(HOME / "pyproject.toml", copy)
        status, output = run_tests(copy, sorted({test for m in mutants for test in m.tests}))
        if status != PASSED:
            sys.exit(f"{output}\nwithout a mutant the tests must pass")
        killed = 0
        for mutant in mutants:
            with plant(mutant, copy):
                status, output = run_tests(copy, mutant.tests, mutant.file)
            killed += status == KILLED
            by = [line[7:].split(" - ")[0] for line in output.splitlines() if line[:7] == "FAILED "]
            verdict = VERDICTS.get(status, f"status {status}")
            print(f"{verdict:14} {mutant.name}: {' '.join(by)}", flush=True)
    print(f"{killed} of {len(mutants)} killed in {sum(os.times()[:4]):.0f} CPU seconds")
    sys.exit(killed < len(mutants))


if __name__ == "__main__":
    main()

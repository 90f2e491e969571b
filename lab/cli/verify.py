"""`lab verify`: random examples for the properties that the package must have."""

import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from lab.cli.messages import refuse

TESTS = Path(__file__).parents[2] / "tests" / "property"
FAILED = 1
"""pytest's exit code when a test has failed."""


def verify(
    minutes: Annotated[float, typer.Option(help="Stop after this many minutes.")] = 10.0,
) -> None:
    """Test the package's properties on ever new random examples, for a limited time.

    Each round tries 50 examples of every property. A property that fails is shown with the smallest
    example, and ends the command with code 1. This needs a checkout of the project, because its
    tests are not part of an installed package.
    """
    if not 0 < minutes < float("inf"):
        raise refuse(f"minutes={minutes}: must be > 0", 2)
    if not TESTS.is_dir():
        raise refuse(f"{TESTS} does not exist: lab verify needs a checkout with its tests", 2)
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        raise refuse(f"{' and '.join(missing)} must be installed, as the extra dev does", 2)
    command = [sys.executable, "-m", "pytest", str(TESTS), "-q", "-x", "-p", "no:cacheprovider"]
    end, rounds = time.monotonic() + 60 * minutes, 0
    while (left := end - time.monotonic()) > 0:
        process = subprocess.Popen([*command, "--hypothesis-profile=random"])
        try:
            code = process.wait(left)
        except subprocess.TimeoutExpired:
            process.terminate()  # pytest would answer an interrupt with a traceback
            if process.wait() != FAILED:
                typer.echo()  # pytest's dots have no end of line
                break
            code = FAILED
        if code:
            raise typer.Exit(1)
        rounds += 1
    tried = f"; rounds completed: {rounds}" if rounds else ", but not every property was tried"
    typer.echo(f"no property failed in {minutes:g} minute{'s' * (minutes != 1)}{tried}")

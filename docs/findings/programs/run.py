"""Run every program of this folder: does what it shows still show, with the versions it names?"""

import subprocess
import sys
from pathlib import Path

SECONDS = 300
HERE = Path(__file__).parent


def run(program: Path) -> tuple[str, str]:
    """Return whether a program's fault shows, and the last line that it printed."""
    command = [sys.executable, "-W", "ignore", str(program)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "broken", f"took longer than {SECONDS} s"
    # An exception that is not caught exits with 1 too.
    if ran.returncode not in (0, 1) or "Traceback" in ran.stderr:
        return "broken", (ran.stderr.strip().splitlines() or [f"exit {ran.returncode}"])[-1]
    words = (ran.stdout.strip().splitlines() or ["printed nothing"])[-1]
    return ("shows" if ran.returncode else "does not show"), words


def main() -> None:
    """Print a line for each program; exit with 1 if one does not show its fault."""
    programs = sorted(path for path in HERE.glob("*.py") if path != Path(__file__))
    shown = 0
    for program in programs:
        verdict, words = run(program)
        shown += verdict == "shows"
        print(f"{program.stem:40} {verdict:14} {words}", flush=True)
    print(f"{shown} of {len(programs)} show")
    sys.exit(shown < len(programs))


if __name__ == "__main__":
    main()

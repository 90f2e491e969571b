"""The edge of the command line: whatever happens inside ends in one line and an exit code."""

import errno
import os
import sys
import tempfile
import traceback
from collections.abc import Callable

import typer

FAILED, MISUSED, INTERRUPTED = 1, 2, 130


def run(app: Callable[..., object]) -> int:
    """Run the command line, and return its exit code.

    An error that no command expects is reported in one line, which names a file with its traceback.
    """
    if sys.stdout is None or sys.stderr is None:  # a file that is opened would take its place
        closed = "standard output" if sys.stdout is None else "standard error"
        print(f"Error: {closed} is closed; /dev/null discards what is printed", file=sys.stderr)
        return FAILED
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:  # a name of a file need not be text that can be printed
            reconfigure(errors="backslashreplace")
    if not _has_folder():  # torch would end the process
        return _say("the working directory no longer exists; go to another", FAILED)
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.TyperException as error:
        return _say(error.format_message(), MISUSED)
    except typer.Abort as error:
        if isinstance(error.__cause__, EOFError):  # typer takes it for the end of typed input
            return _report_unexpected(error.__cause__)
        return _say("interrupted", INTERRUPTED)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except SystemExit as error:  # typer's, after completing a word for a shell; `Group` has others
        return error.code if isinstance(error.code, int) else FAILED
    except OSError as error:
        if error.errno == errno.EPIPE:
            # Nobody reads any more; Python would try to write the rest when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return FAILED
        named = f"{error.filename}: " if error.filename is not None else ""
        return _say(f"{named}{error.strerror or error}{_keep_traceback()}", FAILED)
    except MemoryError:
        return _say(f"memory is full{_keep_traceback()}; choose smaller sizes", FAILED)
    except BaseException as error:
        return _report_unexpected(error)


def _has_folder() -> bool:
    """Whether the working directory still exists."""
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def _report_unexpected(error: BaseException) -> int:
    what = f"{type(error).__name__}: {error}"
    if "can't allocate memory" in what or "out of memory" in what:
        return _say(f"memory is full{_keep_traceback()}; choose smaller sizes", FAILED)
    return _say(f"unexpected: {what}{_keep_traceback()}", FAILED)


def _say(reason: str, code: int) -> int:
    from lab.console import open_console
    from lab.files import escape_controls, shorten_message

    line = escape_controls(shorten_message(Exception(reason), most=1000))
    open_console(stderr=True).print(f"Error: {line}")
    return code


def _keep_traceback() -> str:
    """Write the traceback of the error being handled to a new file; return words that name it."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="lab-", suffix=".txt", delete=False, errors="backslashreplace"
        ) as file:
            traceback.print_exc(file=file)
    except OSError:
        return ""
    return f" (details: {file.name})"

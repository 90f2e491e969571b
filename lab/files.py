"""Writing files so that they are whole or absent; reading them with errors a user can act on."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FORMAT = 1
"""Format of the run folder; a newer one is refused."""


class RunError(Exception):
    """A run folder cannot be used, or cannot be written; the message says which and why."""


@contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Raise a `RunError` that names the folder when the system refuses to write below it."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{folder}: cannot be written: {error.strerror or error}") from error


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Lock a folder, so that no other process trains in it.

    Raises:
        RunError: when another process has locked it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise RunError(f"{folder}: another process is training this run; wait for it") from error
    finally:
        os.close(handle)


def write(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name, flush it to the disk, and rename it."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file as `write` does."""
    write(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path, otherwise: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        RunError: with the text `otherwise` and the reason, when the file is missing, unreadable,
            or holds no object.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise RunError(f"{otherwise}: {path.name} is missing") from error
    except OSError as error:
        raise RunError(f"{otherwise}: {error}") from error
    except ValueError as error:
        raise RunError(f"{otherwise}: {path.name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise RunError(f"{otherwise}: {path.name} holds no object")
    return content


def shorten_message(error: Exception) -> str:
    """Shorten an error's text, of many lines in torch, to one line of at most 300 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:299]}…"

"""Errors about files that cannot be used, and how JSON and TOML files are read.

`lab.folder` reads and writes them.
"""

import fcntl
import hashlib
import io
import json
import os
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SEAL = "seal"
"""The entry of a sealed object that holds the digest of the others."""
CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]"
)
MARK = b"wonderful-lab"
"""What each page, figure and program of the lab holds, near its beginning or its end."""
NEAR = 2**12
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


def encode_json(content: dict[str, Any], *, sealed: bool = False, indent: int | None = 2) -> str:
    """Return an object as JSON; a sealed one has the digest of its other entries."""
    if sealed:
        content = {**content, SEAL: _digest(content)}
    return json.dumps(content, indent=indent, ensure_ascii=False) + "\n"


def parse_json(data: bytes, name: str, otherwise: str) -> dict[str, Any]:
    """Return the object in JSON that `encode_json` made, without its digest.

    Control characters in its text, which a terminal would obey, become escapes such as \\x1b.

    Raises:
        RunError: with the text `otherwise` and the reason, for text that is not an object or was
            changed.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RunError(
            f"{otherwise}: {name} is not valid JSON: {shorten_message(error)}"
        ) from error
    if not isinstance(content, dict):
        raise RunError(f"{otherwise}: {name} holds no object")
    seal = content.pop(SEAL, None)
    if seal is not None and seal != _digest(content):
        raise RunError(f"{otherwise}: {name} was changed or damaged since it was written")
    return clean_all(content)


def read_toml(file: Path) -> dict[str, Any]:
    """Return the content of a TOML file that a user has written.

    Raises:
        ValueError: for a file that cannot be read, or is not valid TOML.
    """
    return read_toml_and_bytes(file)[0]


def read_toml_and_bytes(file: Path) -> tuple[dict[str, Any], bytes]:
    """Return the content of a TOML file, and the bytes that it was read from, as for a digest.

    Raises:
        ValueError: as `read_toml`.
    """
    try:
        data = file.read_bytes()
        return tomllib.loads(io.StringIO(data.decode(), newline=None).read()), data
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{file}: cannot be read: {error}") from error


def _digest(content: dict[str, Any]) -> str:
    plain = json.dumps(json.loads(json.dumps(content)), sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()


def escape_controls(text: str) -> str:
    """Write control characters as escapes, so that a terminal shows them and does nothing.

    Line breaks and tabs stay. Marks that turn the direction of writing are escaped too, and halves
    of characters, which no terminal can show.
    """
    return CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def clean_all(value: Any) -> Any:
    """Escape the control characters in all text of a JSON document."""
    if isinstance(value, str):
        return escape_controls(value)
    if isinstance(value, list):
        return [clean_all(each) for each in value]
    if isinstance(value, dict):
        return {escape_controls(name): clean_all(each) for name, each in value.items()}
    return value


def is_marked(path: Path) -> bool:
    """Whether a file has the mark of the lab's pages, figures and programs."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            start = file.read(NEAR)
            file.seek(max(0, os.fstat(file.fileno()).st_size - NEAR))
            return MARK in start or MARK in file.read()
    except OSError:
        return False


def describe_error(error: BaseException) -> str:
    """Return an error's class and text, in one line."""
    return f"{type(error).__name__}: {shorten_message(error)}".removesuffix(": ")


def shorten_message(error: BaseException, most: int = 300) -> str:
    """Shorten an error's text, of many lines in torch, to one line of at most `most` characters.

    Empty where the error, of a class of someone's own, has no text.
    """
    try:
        text = " ".join(str(error).split())
    except Exception:
        return ""
    return text if len(text) <= most else f"{text[: most - 1]}…"

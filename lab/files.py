"""Files: written whole or not at all, and read with care where someone else may have made them.

A file is written under a temporary name, flushed to the disk and renamed. What is read below a run
folder must be a plain file of a sane size that no link leads to: the folder may come from a
stranger. The folder's own path may be a link, since the user has typed it.
"""

import contextlib
import errno
import fcntl
import io
import json
import os
import re
import secrets
import shutil
import stat
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]"
)
LEFTOVER = re.compile(r"\..*\.(writing|removing)")
"""Names that only a process that was killed leaves behind."""
MARK = b"wonderful-lab"
"""What each page, figure and program of the lab holds, near its beginning or its end."""
NEAR = 2**12
MOST_JSON, MOST_TOML = 2**24, 2**20
"""Bytes of the largest JSON and TOML that is read: what is parsed takes many times as many."""
MOST_PAGE = 2**28
"""Bytes of the largest page that is read."""


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


@contextmanager
def share(folder: Path) -> Iterator[None]:
    """Keep other processes from removing what is in a folder, for a `with` block."""
    if not folder.is_dir():
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


@contextmanager
def own(folder: Path) -> Iterator[bool]:
    """Yield whether no other process shares a folder; inside the block, none can start to."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(handle)


def find_inside(folder: Path, name: str) -> Path:
    """Return the path of a file below a folder, whether or not it is there.

    Raises:
        RunError: where a link is in the way.
    """
    path = folder
    for part in Path(name).parts:
        path /= part
        if path.is_symlink():
            raise RunError(f"{path}: is a link, must be a file or folder of its own")
    return path


def list_inside(folder: Path, name: str = "") -> list[str]:
    """Return the names in a folder below another, sorted; none if it is missing.

    Raises:
        RunError: where a link is in the way.
    """
    try:
        return sorted(os.listdir(find_inside(folder, name)))
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a plain file, open to be read: all files that others may have made are opened here.

    Raises:
        RunError: for a link, a device, a pipe or a folder.
        OSError: when the system refuses.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise RunError(f"{path}: is a link, must be a file") from error
        raise
    with open(handle, "rb") as stream:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise RunError(f"{path}: is a folder, a device or a pipe, must be a file")
        yield stream


def read(path: Path, most: int) -> bytes:
    """Return the content of a plain file of at most so many bytes.

    Raises:
        RunError: as `open_file`, and for a file that is larger.
        OSError: when the system refuses.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise RunError(f"{path}: has {size:,} bytes, must be ≤ {most:,}")
        return file.read()


def read_end(path: Path, size: int) -> bytes:
    """Return at most so many of the last bytes of a plain file.

    Raises:
        RunError, OSError: as `open_file`.
    """
    with open_file(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - size))
        return file.read(size)


def read_json(path: Path, otherwise: str, most: int = MOST_JSON) -> dict[str, Any]:
    """Return the object in a JSON file, its control characters escaped.

    Raises:
        RunError: with the text `otherwise` and the reason, when the file is missing, unreadable or
            holds no object.
    """
    try:
        content = json.loads(read(path, most))
    except (FileNotFoundError, NotADirectoryError) as error:
        there = "it is a file" if path.parent.is_file() else f"{path.name} is missing"
        missing = there if path.parent.exists() else "it does not exist"
        raise RunError(f"{otherwise}: {missing}") from error
    except OSError as error:
        raise RunError(f"{otherwise}: {error.strerror or error}") from error
    except RunError as error:
        raise RunError(f"{otherwise}: {error}") from error
    except (ValueError, RecursionError) as error:
        why = shorten_message(error)
        raise RunError(f"{otherwise}: {path.name} is not valid JSON: {why}") from error
    if not isinstance(content, dict):
        raise RunError(f"{otherwise}: {path.name} holds no object")
    return clean_all(content)


def read_toml(file: Path) -> dict[str, Any]:
    """Return the content of a TOML file that a user has written, its control characters escaped.

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
        data = read(file.resolve(), MOST_TOML)
        content = tomllib.loads(io.StringIO(data.decode(), newline=None).read())
        return clean_all(content), data
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (RunError, RecursionError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from error


def has_entries(path: Path, *names: str, most: int = MOST_JSON) -> bool:
    """Whether a plain file holds a JSON object with these entries, as the lab's own files do."""
    try:
        return {*names} <= read_json(path, "", most).keys()
    except RunError:
        return False


def write(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name, flush it to the disk, and rename it."""
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    with replace_file(path) as file, open(file, "wb") as stream:
        stream.write(data)


def write_json(path: Path, content: dict[str, Any], indent: int | None = 2) -> None:
    """Write an object as JSON, as `write` does."""
    write(path, json.dumps(content, indent=indent, ensure_ascii=False) + "\n")


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield the path of a new, empty file; when the `with` block ends well, it becomes `path`."""
    temporary = path.with_name(_draw_name("writing"))
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        yield temporary
        _flush(temporary)
        os.replace(temporary, path)
        _flush(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield the path of a new folder; when the `with` block ends well, it becomes `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(_draw_name("writing"))
    try:
        temporary.mkdir()
        yield temporary
        os.rename(temporary, path)
        _flush(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; of a link, only the link."""
    if path.is_dir() and not path.is_symlink():
        # Out of sight at once: a folder that is half removed must not be taken for whole.
        hidden = path.with_name(_draw_name("removing"))
        os.rename(path, hidden)
        shutil.rmtree(hidden)
    else:
        os.unlink(path)


def clear_leftovers(folder: Path) -> None:
    """Remove what a killed process left behind in a folder, as far as the system allows."""
    for name in list_inside(folder):
        if LEFTOVER.fullmatch(name):
            with contextlib.suppress(OSError):
                remove(folder / name)


def _draw_name(kind: str) -> str:
    return f".{secrets.token_hex(8)}.{kind}"


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
        with open_file(path) as file:
            return MARK in file.read(NEAR) or MARK in read_end(path, NEAR)
    except (OSError, RunError):
        return False


def check_output(
    option: str, path: Path, force: bool, is_own: Callable[[Path], bool] = is_marked
) -> None:
    """Check that a file may be written.

    Args:
        option: that named it.
        path: the file.
        force: overwrite any file.
        is_own: whether the lab made a file.

    Raises:
        ValueError: for a name that is none, a folder or a device, or a file that the lab did not
            make, unless forced.
    """
    if not path.name:
        raise ValueError(f"{option}={str(path)!r}: must name a file")
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise ValueError(f"{option}={path}: {getattr(error, 'strerror', None) or error}") from error
    if stat.S_ISDIR(found.st_mode):
        raise ValueError(f"{option}={path}: is a folder, must be a file")
    if stat.S_ISLNK(found.st_mode):  # which would be replaced, as /dev/stdout would be
        raise ValueError(f"{option}={path}: is a link, must be a file; name what it leads to")
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{option}={path}: is a device or a pipe, must be a file")
    if not force and not is_own(path):
        raise ValueError(
            f"{option}={path}: is there, and the lab did not make it; choose another name, or "
            "--force overwrites it"
        )


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

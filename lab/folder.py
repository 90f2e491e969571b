"""The files of one folder: whole or absent, and reached without following links below it.

A folder may come from a stranger, with links, pipes or devices in place of files. So each part of a
name is opened by itself, from the folder's own descriptor on, and only plain files are read. The
folder's own path may be a link: the user has typed it.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.files import RunError, encode_json, parse_json

LEFTOVER = re.compile(r"\..*\.(writing|removing)")
"""Names that only a process that was killed leaves behind."""
MOST_JSON = 2**28
"""Bytes of the largest JSON file that is read: what is parsed takes up to twenty times as many."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class Folder:
    """A folder; the names of its files are paths below it, such as "history/step-1.safetensors".

    Methods raise a `RunError` where a link or no plain file is in the way, and otherwise an
    OSError where the system refuses.
    """

    path: Path

    def exists(self, name: str) -> bool:
        """Whether there is anything of this name, a broken link included."""
        try:
            with self._open_parent(name) as (parent, last):
                os.lstat(last, dir_fd=parent)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def list(self, name: str = "") -> list[str]:
        """Return the names in a folder below this one, sorted; none if it is missing."""
        try:
            with self._open(name) as folder:
                return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    def make(self, name: str) -> None:
        """Make a folder below this one unless it is there."""
        with self._open_parent(name) as (parent, last), contextlib.suppress(FileExistsError):
            os.mkdir(last, dir_fd=parent)
            os.fsync(parent)
        with self._open(name):  # it is not a link
            pass

    def read(self, name: str, most: int | None = None) -> bytes:
        """Return the content of a file that memory holds, of at most so many bytes."""
        with self._open_parent(name) as (parent, last):
            file = self._open_plain(name, last, os.O_RDONLY | PLAIN, parent)
            with open(file, "rb") as stream:
                size = os.fstat(file).st_size
                if most is not None and size > most:
                    raise RunError(f"{self.path / name}: has {size:,} bytes, must be ≤ {most:,}")
                try:
                    return stream.read()
                except MemoryError as error:
                    raise RunError(f"{self.path / name}: no memory for {size} bytes") from error

    def read_json(self, name: str, otherwise: str) -> dict[str, Any]:
        """Read a JSON object.

        Raises:
            RunError: with the text `otherwise` and the reason, when the file is missing,
                unreadable, holds no object, or has changed since it was written.
        """
        last = Path(name).name
        try:
            return parse_json(self.read(name, MOST_JSON), last, otherwise)
        except (FileNotFoundError, NotADirectoryError) as error:
            there = "it is a file" if self.path.is_file() else f"{last} is missing"
            missing = there if self.path.exists() else "it does not exist"
            raise RunError(f"{otherwise}: {missing}") from error
        except OSError as error:
            raise RunError(f"{otherwise}: {error.strerror or error}") from error

    def write(self, name: str, content: str | bytes) -> None:
        """Write a file under a random name, flush it to the disk, and rename it."""
        data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
        with self.write_file(name) as (_, file), open(file, "wb", closefd=False) as stream:
            stream.write(data)

    @contextlib.contextmanager
    def write_file(self, name: str) -> Iterator[tuple[Path, int]]:
        """Yield a new, empty file under a random name, which others write in a `with` block.

        When the block ends well, what was written is flushed to the disk, and the file renamed.

        Yields:
            Its path, and a descriptor for writing, which stays open until the block ends.
        """
        with self._open_parent(name) as (parent, last):
            temporary = _draw_name("writing")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | PLAIN
            file = os.open(temporary, flags, 0o666, dir_fd=parent)
            try:
                yield self.path / Path(name).with_name(temporary), file
                os.fsync(file)
                os.replace(temporary, last, src_dir_fd=parent, dst_dir_fd=parent)
                os.fsync(parent)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=parent)
                raise
            finally:
                os.close(file)

    def write_json(
        self,
        name: str,
        content: dict[str, Any],
        *,
        sealed: bool = False,
        indent: int | None = 2,
    ) -> None:
        """Write a JSON file; a sealed one holds its digest, by which a change is noticed."""
        self.write(name, encode_json(content, sealed=sealed, indent=indent))

    def open_to_append(self, name: str) -> int:
        """Return a descriptor to which lines can be added; the caller closes it."""
        with self._open_parent(name) as (parent, last):
            return self._open_plain(name, last, os.O_WRONLY | os.O_CREAT | os.O_APPEND, parent)

    def move(self, name: str, to: str) -> None:
        """Rename a file or folder, within the folder that it is in."""
        with self._open_parent(name) as (parent, last):
            os.rename(last, Path(to).name, src_dir_fd=parent, dst_dir_fd=parent)
            os.fsync(parent)

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it; of a link, only the link."""
        with self._open_parent(name) as (parent, last):
            try:
                os.unlink(last, dir_fd=parent)
            except (IsADirectoryError, PermissionError):
                # Out of sight at once: a folder that is half removed must not be taken for whole.
                hidden = _draw_name("removing")
                os.rename(last, hidden, src_dir_fd=parent, dst_dir_fd=parent)
                shutil.rmtree(hidden, dir_fd=parent)

    @contextlib.contextmanager
    def write_folder(self, name: str) -> Iterator[str]:
        """Yield the name of a new folder, which is renamed when the `with` block ends well."""
        home = Path(name).parent
        temporary = (home / _draw_name("writing")).as_posix()
        try:
            if home.name:
                self.make(home.as_posix())
            self.make(temporary)
            yield temporary
            self.move(temporary, name)
        except BaseException:
            with contextlib.suppress(OSError, RunError):
                self.remove(temporary)
            raise

    def flush(self, name: str) -> None:
        """Flush the files in a folder to the disk, and the folder itself."""
        with self._open(name) as folder:
            for each in os.listdir(folder):
                file = self._open_plain(f"{name}/{each}", each, os.O_RDONLY, folder)
                os.fsync(file)
                os.close(file)
            os.fsync(folder)

    def clear_leftovers(self, name: str = "") -> None:
        """Remove what a killed process left behind in a folder, as far as the system allows."""
        for each in self.list(name):
            if LEFTOVER.fullmatch(each):
                with contextlib.suppress(OSError):
                    self.remove(f"{name}/{each}" if name else each)

    @contextlib.contextmanager
    def share(self, name: str) -> Iterator[None]:
        """Keep other processes from removing what is in a folder, for a `with` block."""
        try:
            opened = self._open(name)
            folder = opened.__enter__()
        except FileNotFoundError:
            yield
            return
        try:
            fcntl.flock(folder, fcntl.LOCK_SH)
            yield
        finally:
            opened.__exit__(None, None, None)

    @contextlib.contextmanager
    def own(self, name: str) -> Iterator[bool]:
        """Yield whether no other process shares a folder; inside the block, none can start to."""
        with self._open(name) as folder:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[int]:
        """Open a folder below this one, or this one if the name is empty."""
        folder = os.open(self.path, FOLDER)
        try:
            done = self.path
            for part in Path(name).parts:
                done /= part
                try:
                    inner = os.open(part, FOLDER | os.O_NOFOLLOW, dir_fd=folder)
                except NotADirectoryError as error:
                    raise RunError(_explain(done)) from error
                except OSError as error:
                    if error.errno == errno.ELOOP:
                        raise RunError(_explain(done)) from error
                    raise
                os.close(folder)
                folder = inner
            yield folder
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _open_parent(self, name: str) -> Iterator[tuple[int, str]]:
        """Open the folder that a file is in; yields it, and the file's name in it."""
        path = Path(name)
        if path.is_absolute() or ".." in path.parts or not path.name:
            raise RunError(f"{self.path}: {name!r} is not below it")
        with self._open(path.parent.as_posix()) as parent:
            yield parent, path.name

    def _open_plain(self, name: str, last: str, flags: int, parent: int) -> int:
        """Open a plain file in a folder."""
        try:
            file = os.open(last, flags | PLAIN, 0o666, dir_fd=parent)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise RunError(_explain(self.path / name)) from error
            raise
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise RunError(_explain(self.path / name))
        return file


def _explain(path: Path) -> str:
    kind = "a link, which is not followed" if path.is_symlink() else "no plain file or folder"
    return f"{path}: is {kind}"


def _draw_name(kind: str) -> str:
    return f".{secrets.token_hex(8)}.{kind}"


def write(path: Path, content: str | bytes) -> None:
    """Write a file as `Folder.write` does."""
    Folder(path.parent).write(path.name, content)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file as `write` does."""
    write(path, encode_json(content))


def read_json(path: Path, otherwise: str) -> dict[str, Any]:
    """Read a JSON object as `Folder.read_json` does."""
    return Folder(path.parent).read_json(path.name, otherwise)


def has_entries(path: Path, *names: str) -> bool:
    """Whether a plain file holds a JSON object with these entries, as the lab's own files do."""
    try:
        return {*names} <= read_json(path, "").keys()
    except RunError:
        return False

"""The bytes of a text: a file, or the text files of a folder, read only where rows need them.

Bytes are bytes: a text need not be UTF-8, and `Corpus.note` says where it is not. Files are memory
maps, so a text may be larger than memory. To read a map whose file has shrunk ends the process:
Python cannot catch that. So before every read a file's size and time of change are compared with
those at opening; a file that shrinks during a read is not guarded against.
"""

import codecs
import mmap
import os
import stat
import sysconfig
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate

import numpy as np
from jaxtyping import Int64, UInt8

from tasks.bounds import TextChangedError

SAMPLE = 2**16
"""Bytes at the start of a file that tell text from binary, and UTF-8 from other encodings."""
ENDS = 2**12
"""Bytes at each end of a file that its digest covers."""
JOINT = 0
"""The byte between two files: one that never occurs in text."""
MAPS = 64
"""Files mapped at a time: each takes one of a process's few hundred file descriptors."""
NOT_SOURCES = frozenset(
    ("__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests")
)
"""Folders of the standard library's path that hold no sources of the library."""


class _UnfitError(Exception):
    """A file is not text; the arguments are the reason in a word or two, and as a clause."""


@dataclass(frozen=True)
class _File:
    """A file as it was when the corpus was opened.

    Attributes:
        path: full path.
        size: bytes, ≥ 1.
        changed: time of the last change, ns.
        digest: of its size and both ends.
        is_utf8: whether its beginning is UTF-8.
    """

    path: str
    size: int
    changed: int
    digest: bytes
    is_utf8: bool


class Corpus:
    """A text at a path: its files end to end in the order of their names, byte 0 between two.

    In a folder, files that are hidden, links, empty, binary, unreadable or not plain are left out.

    Attributes:
        path: as given; None for the standard library.
        root: the full path, with links resolved.
        size: bytes, those between files included.
        digest: of each file's name below the path, its size, and its first and last 4 KiB; other
            changes that keep the size go unnoticed.
        skipped: how many files or folders were left out, by reason.
    """

    def __init__(self, path: str | None, root: str, files: list[_File], skipped: Mapping[str, int]):
        self.path, self.root = path, root
        self.skipped = dict(skipped)
        self._files = files
        self._starts = [0, *accumulate(file.size + 1 for file in files)]
        self.size = self._starts.pop() - 1
        whole = blake2b(digest_size=8)
        for file in files:
            name = os.fsencode(os.path.relpath(file.path, root))
            whole.update(len(name).to_bytes(8, "little") + name + file.digest)
        self.digest = whole.hexdigest()

    @property
    def note(self) -> str:
        """A warning if the text is not UTF-8, else an empty string."""
        others = sum(not file.is_utf8 for file in self._files)
        if not others:
            return ""
        return f"{others} of {len(self._files)} files are not UTF-8; bytes are read as they are"

    def read(self, offsets: Int64[np.ndarray, " b"], length: int) -> UInt8[np.ndarray, "b l"]:
        """Return `length` bytes from each offset on; offset + length must be ≤ size.

        Raises:
            TextChangedError: if a file that holds them has changed.
        """
        rows = np.full((len(offsets), length), JOINT, np.uint8)
        held, pages = -1, rows[:0]
        for row in offsets.argsort().tolist():  # so that a file is seldom mapped twice
            offset, done = int(offsets[row]), 0
            while done < length:
                number = bisect_right(self._starts, offset + done) - 1
                if number != held:
                    held, pages = number, self._map_unchanged(self._files[number])
                begin = offset + done - self._starts[number]
                piece = pages[begin : begin + length - done]
                rows[row, done : done + len(piece)] = piece
                done += len(piece) + 1
        return rows

    def _map_unchanged(self, file: _File) -> np.ndarray:
        """Map a file that has not changed since it was opened.

        Raises:
            TextChangedError: if it has changed.
        """
        try:
            now = os.stat(file.path)
            if (now.st_size, now.st_mtime_ns) == (file.size, file.changed):
                return _map(file)
            reason = "has changed since it was opened"
        except (OSError, ValueError) as error:  # ValueError: it is shorter now
            reason = f"can no longer be read: {error}"
        _open.cache_clear()  # so that the path can be opened anew, as it now is
        raise TextChangedError(f"path={self.path!r}: {file.path!r} {reason}")


def open_corpus(path: str | None) -> Corpus:
    """Open the text at a path, or the sources of Python's standard library where it is None.

    The result is cached until the file or folder at the path itself changes.

    Raises:
        ValueError: naming the path, if there is no text.
    """
    with _name_path_in_errors(path):
        if path == "":
            raise _UnfitError("nothing", "must name a file or a folder")
        root = sysconfig.get_path("stdlib") if path is None else path
        if os.path.islink(root) and not os.path.lexists(os.path.realpath(root)):
            raise _UnfitError("link", "is a link to nothing")
        now = os.stat(root)
        return _open(path, os.path.realpath(root), now.st_ino, now.st_size, now.st_mtime_ns)


@contextmanager
def _name_path_in_errors(path: str | None) -> Iterator[None]:
    """Turn errors about a path into a ValueError that names the path."""
    try:
        yield
    except _UnfitError as error:
        raise ValueError(f"path={path!r}: {error.args[1]}") from error
    except OSError as error:
        raise ValueError(f"path={path!r}: {error.strerror}") from error
    except ValueError as error:  # a path that no system call takes
        raise ValueError(f"path={path!r}: {error}") from error


@lru_cache(maxsize=8)
def _open(path: str | None, root: str, *_stamp: int) -> Corpus:
    """Open a file or a folder; the stamp only tells its versions apart in the cache."""
    if not os.path.isdir(root):
        return Corpus(path, root, [_inspect(root)], {})
    skipped: Counter[str] = Counter()
    files = []
    for candidate in _list_files(root, _is_source if path is None else None, skipped):
        try:
            files.append(_inspect(candidate))
        except _UnfitError as error:
            skipped[error.args[0]] += 1
        except OSError:
            skipped["unreadable"] += 1
    if not files:
        found = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        raise _UnfitError("empty", f"holds no text ({found or 'nothing at all'})")
    return Corpus(path, root, sorted(files, key=lambda file: os.fsencode(file.path)), skipped)


def _list_files(
    root: str, wanted: Callable[[os.DirEntry[str]], bool] | None, skipped: Counter[str]
) -> Iterator[str]:
    """Yield the path of every file below a folder; links are never followed."""
    pending = [root]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(folder) as found:
                entries = list(found)
        except OSError:
            if folder == root:
                raise
            skipped["unreadable"] += 1
            continue
        for entry in filter(wanted, entries):
            if entry.name.startswith("."):
                skipped["hidden"] += 1
            elif entry.is_symlink():
                skipped["link"] += 1
            elif entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)
            else:
                yield entry.path


def _is_source(entry: os.DirEntry[str]) -> bool:
    if entry.is_dir(follow_symlinks=False):
        return entry.name not in NOT_SOURCES
    return entry.name.endswith(".py")


def _inspect(path: str) -> _File:
    """Read both ends of a file, and return what they say about it.

    Raises:
        _UnfitError: if it is not a text file.
        OSError: if it cannot be read.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe blocks, a device may act
        raise _UnfitError("not a file", "is a pipe, a socket or a device, must be a file or folder")
    with _open_descriptor(path) as descriptor:
        now = os.fstat(descriptor)
        start = os.pread(descriptor, SAMPLE, 0)
        end = os.pread(descriptor, ENDS, max(0, now.st_size - ENDS))
    if not start:
        raise _UnfitError("empty", "is empty")
    # The system makes some files when they are read, such as those in /proc.
    if len(start) != min(now.st_size, SAMPLE):
        raise _UnfitError(
            "not a file",
            f"is no regular file: its size is reported as {now.st_size} bytes, but it has more",
        )
    if b"\0" in start:
        raise _UnfitError(
            "binary",
            f"is binary (a NUL in its first {SAMPLE} bytes; UTF-16 is to be made UTF-8 first)",
        )
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start, final=len(start) == now.st_size)
        is_utf8 = True
    except UnicodeDecodeError:
        is_utf8 = False
    digest = blake2b(start[:ENDS], digest_size=16)
    digest.update(now.st_size.to_bytes(8, "little") + end)
    return _File(path, now.st_size, now.st_mtime_ns, digest.digest(), is_utf8)


@contextmanager
def _open_descriptor(path: str) -> Iterator[int]:
    """Open a file for reading; O_NONBLOCK so that a file that has become a pipe cannot block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@lru_cache(maxsize=MAPS)
def _map(file: _File) -> np.ndarray:
    """Map a file into memory, uint8 [size]."""
    with _open_descriptor(file.path) as descriptor:
        pages = mmap.mmap(descriptor, file.size, access=mmap.ACCESS_READ)
    # Rows start at random offsets: reading ahead would read bytes that no row needs.
    pages.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(pages, np.uint8)

"""Reading a text safely: what is read, left out and refused, and what changes meanwhile."""

import os
import resource
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from tasks.corpus import MAPS, SAMPLE, open_corpus

GIB = 2**30


def read(path: Path, offset: int, length: int) -> bytes:
    return open_corpus(str(path)).read(np.array([offset]), length).tobytes()


def written(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def private_memory() -> int:
    """Return the bytes that this process holds and no file backs."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def test_a_file_is_read_at_any_offset(tmp_path: Path):
    content = bytes(range(1, 256)) * 20
    text = open_corpus(str(written(tmp_path / "a.txt", content)))
    assert text.size == len(content)
    offsets = np.array([0, 7, 5000, len(content) - 30])
    rows = text.read(offsets, 30)
    assert [row.tobytes() for row in rows] == [content[i : i + 30] for i in offsets]


def test_a_folder_is_its_files_end_to_end_by_name(tmp_path: Path):
    parts = {"b.txt": "bbb", "a/z.md": "zz", "a/b/c": "c", "a.txt": "a" * 9, "é.txt": "é"}
    for name, content in parts.items():
        written(tmp_path / name, content)
    whole = b"\0".join(parts[name].encode() for name in sorted(parts, key=os.fsencode))
    text = open_corpus(str(tmp_path))
    assert text.size == len(whole)
    for length in (1, 2, 5, len(whole)):
        offsets = np.arange(len(whole) - length + 1)
        rows = text.read(offsets, length)
        assert [row.tobytes() for row in rows] == [whole[i : i + length] for i in offsets]


def test_what_is_no_text_is_left_out_of_a_folder_and_counted(tmp_path: Path, monkeypatch):
    written(tmp_path / "kept.txt", "kept")
    written(tmp_path / "empty.txt", "")
    written(tmp_path / "image.png", b"PNG\0")
    written(tmp_path / ".git/objects/ab", "hidden")
    written(tmp_path / "locked.txt", "locked")
    written(tmp_path / "closed/a.txt", "closed")
    (tmp_path / "again").symlink_to(tmp_path)
    (tmp_path / "gone.txt").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)  # a socket's name may be no longer than 108 bytes
        server.bind("socket")
        refuse(monkeypatch, "open", tmp_path / "locked.txt")
        refuse(monkeypatch, "scandir", tmp_path / "closed")
        text = open_corpus(str(tmp_path))
    assert text.size == 4
    assert text.skipped == {
        "binary": 1,
        "empty": 1,
        "hidden": 1,
        "link": 2,
        "not a file": 2,
        "unreadable": 2,
    }


def refuse(monkeypatch, name: str, path: Path) -> None:
    """Have a call of the system refuse a path: root, whom tests may run as, may read all."""
    call = getattr(os, name)

    def refusing(given, *rest):
        if os.fspath(given) == os.fspath(path):
            raise PermissionError(13, "Permission denied", str(path))
        return call(given, *rest)

    monkeypatch.setattr(os, name, refusing)


def make_folder_without_text(path: Path) -> None:
    for name, content in (("a.bin", b"\0"), ("b.bin", b"\0"), ("empty", b"")):
        written(path / name, content)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.symlink_to("nowhere"), "is a link to nothing"),
        (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
        (os.mkfifo, "is a pipe, a socket or a device, must be a file or folder"),
        (Path.touch, "is empty"),
        (
            lambda path: path.write_bytes(b"a" * (SAMPLE - 1) + b"\0"),
            r"is binary \(a NUL in its first 65536 bytes",
        ),
        (
            lambda path: path.write_text("text", encoding="utf-16"),
            "is binary .*UTF-16 is to be made UTF-8 first",
        ),
        (Path.mkdir, r"holds no text \(nothing at all\)"),
        (make_folder_without_text, r"holds no text \(2 binary, 1 empty\)"),
    ],
)
def test_a_path_without_text_is_refused_in_one_line(tmp_path: Path, make, reason: str):
    path = tmp_path / "te\nxt"
    make(path)
    with pytest.raises(ValueError, match=rf"^path='.*te\\nxt': {reason}") as caught:
        open_corpus(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "must name a file or a folder"),
        ("/dev/zero", "is a pipe, a socket or a device"),
        ("a\0b", "embedded null byte"),
        ("/dev/null/a", "Not a directory"),
        ("a" * 5000, "File name too long"),
    ],
)
def test_a_path_that_cannot_be_one_is_refused(path: str, reason: str):
    with pytest.raises(ValueError, match=f"^path='.*': {reason}"):
        open_corpus(path)


def test_a_file_or_folder_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch):
    path = written(tmp_path / "a.txt", "a")
    refuse(monkeypatch, "open", path)
    refuse(monkeypatch, "scandir", tmp_path)
    for refused in (path, tmp_path):
        with pytest.raises(ValueError, match=r"^path='.*': Permission denied"):
            open_corpus(str(refused))


def test_bytes_that_are_not_utf8_are_read_and_said(tmp_path: Path):
    written(tmp_path / "latin.txt", "naïve".encode("latin-1"))
    written(tmp_path / "utf8.txt", "naïve")
    assert read(tmp_path / "latin.txt", 2, 1) == b"\xef"
    assert open_corpus(str(tmp_path)).note.startswith("1 of 2 files are not UTF-8")
    # The sample ends inside a character; the file does not.
    long = written(tmp_path / "long.txt", "a" + "é" * SAMPLE)
    assert open_corpus(str(long)).note == ""
    cut = written(tmp_path / "cut.txt", "é".encode()[:1])
    assert open_corpus(str(cut)).note


def test_a_file_that_shrinks_is_an_error_and_no_crash(tmp_path: Path):
    path = written(tmp_path / "folder/a.txt", b"a" * 10**5)
    text = open_corpus(str(path.parent))
    assert text.read(np.array([99_000]), 10).tobytes() == b"a" * 10
    os.truncate(path, 10)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^path=.*a\.txt' has changed since it was opened"):
            text.read(np.array([99_000]), 10)
    assert open_corpus(str(path.parent)).size == 10


def test_a_file_that_changes_or_goes_is_an_error(tmp_path: Path):
    path = written(tmp_path / "a.txt", "first")
    text = open_corpus(str(path))
    path.write_text("other")
    os.utime(path, ns=(1, 1))
    with pytest.raises(ValueError, match=r"a\.txt' has changed since it was opened"):
        text.read(np.array([0]), 5)
    assert read(path, 0, 5) == b"other"
    text = open_corpus(str(path))
    path.unlink()
    with pytest.raises(ValueError, match=r"a\.txt' can no longer be read: .*No such file"):
        text.read(np.array([0]), 5)


def test_digest_is_of_names_sizes_and_ends(tmp_path: Path):
    def digest(folder: str, name: str, content: str) -> str:
        written(tmp_path / folder / name, content)
        return open_corpus(str(tmp_path / folder)).digest

    middle = "m" * 10_000
    first = digest("a", "name", f"a{middle}z")
    assert digest("b", "name", f"a{middle}z") == first
    others = [
        digest("c", "other", f"a{middle}z"),
        digest("d", "name", f"b{middle}z"),
        digest("e", "name", f"a{middle}y"),
        digest("f", "name", f"a{middle}mz"),
    ]
    assert len({first, *others}) == 5
    both = open_corpus(str(tmp_path / "a" / "name"))
    renamed = written(tmp_path / "g.txt", f"a{middle}z")
    assert both.digest == open_corpus(str(renamed)).digest


def test_a_huge_text_takes_neither_time_nor_memory(tmp_path: Path):
    path = written(tmp_path / "huge.txt", b"text " * SAMPLE)
    os.truncate(path, 100 * GIB)
    with open(path, "r+b") as file:
        file.seek(60 * GIB)
        file.write(b"far away")
    before, start = private_memory(), time.perf_counter()
    text = open_corpus(str(path))
    opened = time.perf_counter() - start
    assert text.size == 100 * GIB
    assert text.read(np.array([60 * GIB]), 8).tobytes() == b"far away"
    offsets = np.arange(1000) * (GIB // 10)
    assert text.read(offsets, 256).shape == (1000, 256)
    assert opened < 0.1
    assert private_memory() - before < 20 * 2**20


def test_few_of_many_files_are_open_at_a_time(tmp_path: Path):
    n_files = 3 * MAPS
    for i in range(n_files):
        written(tmp_path / f"{i:03}", f"{i:03}")
    text = open_corpus(str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + MAPS + 5, limits[1]))
    try:
        rows = text.read(np.arange(0, 4 * n_files, 4), 3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [row.tobytes() for row in rows] == [b"%03d" % i for i in range(n_files)]


def test_the_default_is_the_standard_librarys_sources():
    text = open_corpus(None)
    assert 2**20 < text.size < 2**26
    # abc.py stands near the beginning, zipimport.py or a package in z at the end.
    start = text.read(np.array([0]), 2**16).tobytes()
    assert start.count(b"import ") > 10
    assert text.note == ""


def test_what_the_system_makes_when_it_is_read_is_no_text():
    with pytest.raises(ValueError, match="its size is reported as 0 bytes, but it has more"):
        open_corpus("/proc/self/status")

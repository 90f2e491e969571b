"""What a stranger may put into a run folder: files that are none, or hold what none should."""

import hashlib
import json
import os
import shutil
import socket
import stat
import struct
from pathlib import Path
from random import Random

PLACES = (
    "config.json",
    "metrics.jsonl",
    "result.json",
    "analysis.json",
    "report.json",
    "report.html",
    "checkpoint",
    "checkpoint/step-00000006",
    "checkpoint/step-00000006/state.json",
    "checkpoint/step-00000006/model.safetensors",
    "checkpoint/step-00000006/optimizer.safetensors",
    "history",
    "history/step-00000004.safetensors",
)
"""Files and folders of the run that are replaced."""
SCRIPT = "</script><script>alert(1)</script><img src=x onerror=alert(1)>{{7*7}}"
"""Text that would run in a page, or in its template."""
NAMES = (
    b"a\x1b[2Jb",
    b"\xff\xfe",
    b"two\nlines",
    b"[red]x[bold]",
    b"-rf",
    b"n" * 255,
    "\u202egnp.exe".encode(),
    b"step-00000099",
    b"step-99999999999999999999.safetensors",
    "step-\u0663.safetensors".encode(),
    b"step-00000003.safetensors",
    b".x.writing",
    b".x.removing",
)
"""Names of files and folders that are added."""
TEXTS: tuple[bytes, ...] = (
    b"",
    b" \n" * 100,
    b"\0" * 4096,
    b"[" * 1_000_000,
    b'{"a":' * 200_000,
    b"[" + b"0," * 5_000_000 + b"0]",
    b'{"format": 1, "task": "' + b"x" * 20_000_000 + b'"}',
    b"{" + b",".join(b'"k%d": 0' % k for k in range(100_000)) + b"}",
    b'{"step": ' + b"9" * 100_000 + b"}",
    b"\xef\xbb\xbf{}",
    '{"a": 1}'.encode("utf-16"),
    b'{"a": "\\ud800"}',
    b"\xff" * 100,
    b"{}\n" * 100_000,
    b"null",
)
"""Contents that take the place of a file's."""
SIZES = (2**33, 2**43)
"""Bytes of files that have holes only."""


def plant(run: Path, random: Random) -> str:
    """Change one thing in a run folder, and say what."""
    act = random.choice(ACTS)
    return f"{act.__name__}: {act(run, random)}"


def replace_by_link(run: Path, random: Random) -> str:
    """Let something be a link: to its own copy outside, to what is not there, or to a device."""
    place, kind = run / random.choice(PLACES), random.choice(("copy", "missing", "device"))
    target = run.parents[1] / "outside" / place.name
    target.parent.mkdir(exist_ok=True)
    if kind == "copy" and place.is_dir():
        shutil.copytree(place, target)
    elif kind == "copy":
        target.write_bytes(place.read_bytes())
    _remove(place)
    place.symlink_to(os.devnull if kind == "device" else target)
    return f"{place.relative_to(run)} is a link ({kind})"


def replace_by_special(run: Path, random: Random) -> str:
    """Put a pipe, a socket or a device in the place of something."""
    place, kind = _clear(run, random), random.choice(("pipe", "socket", "null", "zero", "full"))
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "socket":
        here = os.open(place.parent, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as bound:  # whose whole path may be too long
            bound.bind(f"/proc/self/fd/{here}/{place.name}")
        os.close(here)
    else:
        number = {"null": 3, "zero": 5, "full": 7}[kind]
        try:
            os.mknod(place, stat.S_IFCHR | 0o666, os.makedev(1, number))
        except PermissionError:
            os.mkfifo(place)
    return f"{place.relative_to(run)} is a {kind}"


def replace_by_hole(run: Path, random: Random) -> str:
    """Let a file be longer than memory, without taking the disk."""
    place, size = _choose_file(run, random), random.choice(SIZES)
    try:
        os.truncate(place, size)
    except OSError:  # the file system has no files of this size
        os.truncate(place, SIZES[0])
    return f"{place.relative_to(run)} has {size} bytes"


def rewrite(run: Path, random: Random) -> str:
    """Give a file another content."""
    place, number = _choose_file(run, random), random.randrange(len(TEXTS))
    place.write_bytes(TEXTS[number])
    return f"{place.relative_to(run)} has text {number}"


def damage(run: Path, random: Random) -> str:
    """Damage a file as a bad disk, an editor or a crash would."""
    place = _choose_file(run, random)
    data = place.read_bytes()
    where = random.randrange(len(data))
    lines = data.splitlines(keepends=True)
    kinds = {
        "one bit": data[:where]
        + bytes([data[where] ^ 1 << random.randrange(8)])
        + data[where + 1 :],
        "cut off": data[:where],
        "zeros at the end": data[:where] + b"\0" * (len(data) - where),
        "zeros added": data + b"\0" * 4096,
        "a line twice": b"".join([*lines, lines[-1]]),
        "a line missing": b"".join(lines[:-2] + lines[-1:]),
        "lines in another order": b"".join(sorted(lines, key=lambda _: random.random())),
        "other line ends": data.replace(b"\n", b"\r\n"),
        "said twice": data + data,
    }
    kind = random.choice(list(kinds))
    place.write_bytes(kinds[kind])
    return f"{place.relative_to(run)}, {kind} at {where}"


def add_name(run: Path, random: Random) -> str:
    """Add a file, a folder or a broken link with a name of its own."""
    home = run / random.choice(("", "checkpoint", "history", "checkpoint/step-00000006"))
    name, kind = random.choice(NAMES), random.choice(("file", "folder", "link"))
    path = os.path.join(os.fsencode(home), name)
    if os.path.lexists(path):
        os.unlink(path)
    if kind == "file":
        Path(os.fsdecode(path)).write_bytes(b"x")
    elif kind == "folder":
        os.mkdir(path)
    else:
        os.symlink(b"/nowhere/at all", path)
    return f"{name[:30]!r}, a {kind} in {home.name}"


def swap_kind(run: Path, random: Random) -> str:
    """Put a folder in the place of a file, or a file in the place of a folder."""
    place = run / random.choice(PLACES)
    was_folder = place.is_dir()
    _remove(place)
    if was_folder:
        place.write_text("no folder")
    else:
        place.mkdir()
        (place / "inside").write_text("x")
    return f"{place.relative_to(run)} is a {'file' if was_folder else 'folder'}"


def link_hard(run: Path, random: Random) -> str:
    """Let a file be one that is outside, too."""
    place = _choose_file(run, random)
    outside = run.parents[1] / "outside"
    outside.mkdir(exist_ok=True)
    os.link(place, outside / place.name)
    return f"{place.relative_to(run)} is outside, too"


def forge_weights(run: Path, random: Random) -> str:
    """Change what safetensors says of its tensors; digests fit, as a stranger can make them."""
    name = random.choice(("model", "optimizer"))
    home = run / "checkpoint/step-00000006"
    file = home / f"{name}.safetensors"
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    tensors = [each for each in header if each != "__metadata__"]
    chosen = random.choice(tensors)
    entry = header[chosen]
    kinds = {
        "missing": lambda: header.pop(chosen),
        "renamed": lambda: header.update({"\x1b[2J": header.pop(chosen)}),
        "another name": lambda: header.update({"a/b/c/d": header.pop(chosen)}),
        "flat": lambda: entry.update(shape=[_count(entry["shape"])]),
        "another type": lambda: entry.update(dtype=random.choice(("I32", "U32", "F64"))),
        "huge shape": lambda: entry.update(shape=[2**40, 2**40]),
        "negative": lambda: entry.update(shape=[-1]),
        "no shape": lambda: entry.pop("shape"),
        "empty": lambda: entry.update(shape=[0], data_offsets=[0, 0]),
        "overlapping": lambda: entry.update(data_offsets=header[tensors[0]]["data_offsets"]),
        "metadata": lambda: header.update({"__metadata__": {"sha256": SCRIPT}}),
    }
    kind = random.choice([*kinds, "header length", "not finite"])
    if kind in kinds:
        kinds[kind]()
    if kind == "not finite":
        body = b"\xff" * len(body)
    text = json.dumps(header).encode()
    length = 2**62 if kind == "header length" else len(text)
    new = struct.pack("<Q", length) + text + body
    file.write_bytes(new)
    state = json.loads((home / "state.json").read_text())
    state["sha256"][name] = hashlib.sha256(new).hexdigest()
    (home / "state.json").write_text(json.dumps(state))
    return f"{name}.safetensors, {kind} ({chosen})"


def inject_text(run: Path, random: Random) -> str:
    """Put text that would run in a page into a file."""
    file = run / random.choice(("analysis.json", "report.json", "result.json"))
    content = json.loads(file.read_text())
    places = [(holder, key) for holder, key in _list_texts(content)]
    holder, key = random.choice(places)
    holder[key] = SCRIPT + "\x1b]0;x\x07"
    file.write_text(json.dumps(content))
    return f"{file.name}, {key}"


def make_loop(run: Path, random: Random) -> str:
    """Let a link lead back to the run."""
    place = run / random.choice(("loop", "history/loop", "checkpoint/loop"))
    place.symlink_to(run, target_is_directory=True)
    return str(place.relative_to(run))


def rename_run(run: Path, random: Random) -> str:
    """Copy the run to a folder with a name of its own, beside it."""
    name = random.choice(NAMES)
    beside = os.path.join(os.fsencode(run.parent), name)
    if not os.path.lexists(beside):
        shutil.copytree(run, os.fsdecode(beside))
    return f"a copy is called {name[:30]!r}"


def _choose_file(run: Path, random: Random) -> Path:
    return random.choice([run / place for place in PLACES if (run / place).is_file()])


def _clear(run: Path, random: Random) -> Path:
    place = run / random.choice(PLACES)
    _remove(place)
    return place


def _remove(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink()


def _count(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _list_texts(content: object) -> list[tuple[dict, str]]:
    """List where a document has texts, as pairs of an object and a name."""
    if isinstance(content, list):
        return [found for each in content for found in _list_texts(each)]
    if not isinstance(content, dict):
        return []
    here = [(content, key) for key, value in content.items() if isinstance(value, str)]
    return here + [found for value in content.values() for found in _list_texts(value)]


ACTS = (
    *(
        replace_by_link,
        replace_by_link,
        replace_by_special,
        replace_by_hole,
        rewrite,
        damage,
        damage,
    ),
    *(add_name, swap_kind, link_hard),
    *(forge_weights, forge_weights, inject_text, make_loop, rename_run),
)
"""What is planted; twice what has most kinds."""

"""Folders of cells on their way between machines that share no disk: files by name, as bytes.

A worker elsewhere gets all of a cell's folder and sends back what it needs to go on: a checkpoint,
the metrics up to it, kept weights, and at the end its results. At home they are written so that a
sweep that is killed in between goes on from this checkpoint or from the one before.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from lab.folder import LEFTOVER, Folder
from lab.sweeps.folder import CellFolder
from lab.training.checkpoint import HOME, keep_only, list_checkpoints

Files = Mapping[str, bytes]
"""The content of files by their path below the folder of a cell."""
OF_HOME = ("cell.json", "spent.json", "run/config.json")
"""What the sweep itself writes, so that nothing from elsewhere takes its place."""
METRICS, RESULTS = "run/metrics.jsonl", ("run/result.json", "lengths.json")


class Delivery(NamedTuple):
    """What a task sends to the folder of the sweep.

    Attributes:
        files: of each cell that has news, by the cell's name.
        ended: the cells that have ended, and their errors.
    """

    files: Mapping[str, Files]
    ended: Sequence[tuple[str, str | None]]


def pack(folder: CellFolder) -> Files:
    """Return all files of a cell's folder but those that a killed process left behind."""
    return {name: Folder(folder.path).read(name) for name in _list_files(folder)}


def unpack(folder: CellFolder, files: Files) -> None:
    """Write files into a new folder.

    Raises:
        OSError: when they cannot be written.
    """
    for name, content in files.items():
        (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
        Folder(folder.path).write(name, content)


class Sender:
    """Collects what is new in the folders of cells that train together.

    Args:
        folders: of the cells, as they came.
    """

    def __init__(self, folders: Sequence[CellFolder]):
        self._sent = {folder: self._stamp(folder) for folder in folders}
        self._steps = {folder: _find_newest(folder) for folder in folders}

    def collect(self, folders: Sequence[CellFolder]) -> dict[CellFolder, Files]:
        """Return what is new of cells that have a new checkpoint.

        Of cells that have checkpoints of the same steps, as lanes do, these are of one step.
        """
        with contextlib.ExitStack() as shared:
            for folder in folders:  # keep training from removing checkpoints
                if folder.run_path.exists():
                    shared.enter_context(Folder(folder.run_path).share(HOME))
            steps = {folder: set(list_checkpoints(folder.run_path)) for folder in folders}
            common = max(set.intersection(*steps.values()), default=None) if steps else None
            found = {}
            for folder, known in steps.items():
                step = common if common is not None else max(known, default=0)
                if step > self._steps[folder]:
                    found[folder] = self._take(folder, step)
                    self._steps[folder] = step
            return found

    def collect_ended(self, folder: CellFolder) -> Files:
        """Return all that is new of a cell that has ended."""
        return self._take(folder, None)

    def _take(self, folder: CellFolder, step: int | None) -> Files:
        """Return what is new up to a checkpoint, or everything."""
        stamps, sent = self._stamp(folder), self._sent[folder]
        wanted = (None,) if step is None else (None, f"{HOME}/step-{step:08d}")
        files = {}
        for name, stamp in stamps.items():
            skipped = step is not None and _find_checkpoint(name) not in wanted
            if name in OF_HOME or skipped or sent.get(name) == stamp:
                continue
            with contextlib.suppress(FileNotFoundError):  # it was replaced meanwhile
                files[name] = Folder(folder.path).read(name)
                sent[name] = stamp
        if step is not None and METRICS in files:  # later rows belong to later checkpoints
            files[METRICS] = b"".join(files[METRICS].splitlines(keepends=True)[:step])
            del sent[METRICS]  # the rest is still to be sent
        return files

    @staticmethod
    def _stamp(folder: CellFolder) -> dict[str, tuple[int, int]]:
        """Return what tells versions of a file apart, by the file's name."""
        stamps = {}
        for name in _list_files(folder):
            with contextlib.suppress(FileNotFoundError):
                found = (folder.path / name).stat()
                stamps[name] = found.st_mtime_ns, found.st_size
        return stamps


def receive(delivered: Mapping[CellFolder, Files]) -> None:
    """Write what has arrived. Cells then continue from it; after an error, from where they were.

    Raises:
        RunError: when there is a link in the way.
        OSError: when something cannot be written.
    """
    for folder, files in delivered.items():
        home, run = Folder(folder.path), Folder(folder.run_path)
        for place, names in groupby(sorted(files, key=_rank), key=_find_checkpoint):
            if place is None:
                for name in names:
                    if "/" in name:
                        home.make(Path(name).parent.as_posix())
                    home.write(name, files[name])
            elif not run.exists(place):
                with run.write_folder(place) as temporary:
                    for name in names:
                        run.write(f"{temporary}/{Path(name).name}", files[name])
    for folder in delivered:  # lanes resume from a step that all of them have
        if newest := _find_newest(folder):
            keep_only(folder.run_path, newest)


def _rank(name: str) -> tuple[int, str]:
    """Order files: a checkpoint needs the metrics up to it, and a result the last checkpoint."""
    if _find_checkpoint(name):
        return 1, name
    return (2 if name in RESULTS else 0), name


def _find_checkpoint(name: str) -> str | None:
    """Return the folder of the checkpoint that a file belongs to, below the run's folder."""
    parts = Path(name).parts
    return f"{HOME}/{parts[2]}" if parts[:2] == ("run", HOME) and len(parts) == 4 else None


def _find_newest(folder: CellFolder) -> int:
    return max(list_checkpoints(folder.run_path), default=0) if folder.run_path.exists() else 0


def _list_files(folder: CellFolder) -> list[str]:
    """Return the names of a cell's files, without those that are being written."""
    found = []
    for place, folders, names in os.walk(folder.path):
        folders[:] = [name for name in folders if not LEFTOVER.fullmatch(name)]
        below = Path(place).relative_to(folder.path)
        found += [(below / name).as_posix() for name in names if not LEFTOVER.fullmatch(name)]
    return found

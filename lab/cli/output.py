"""Files that a user names for output: nothing that the lab did not make is overwritten."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

MARK = b"wonderful-lab"
"""What each page, figure and program of the lab holds, near its beginning or its end."""
NEAR = 2**12

Force = Annotated[
    bool,
    typer.Option("--force", help="Overwrite a file that the lab did not make."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
AsJsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]


def is_marked(path: Path) -> bool:
    """Whether a file has the mark of the lab's pages, figures and programs."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            start = file.read(NEAR)
            file.seek(max(0, os.fstat(file.fileno()).st_size - NEAR))
            return MARK in start or MARK in file.read()
    except OSError:
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
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)):
        raise ValueError(f"{option}={path}: is a device or a pipe, must be a file")
    if not force and not is_own(path):
        raise ValueError(
            f"{option}={path}: is there, and the lab did not make it; choose another name, or "
            "--force overwrites it"
        )

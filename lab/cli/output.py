"""Files that a user names for output: nothing that the lab did not make is overwritten."""

import os
import stat
from pathlib import Path
from typing import Annotated

import typer

MARK = b"wonderful-lab"
"""What each page and figure of the lab holds, near its beginning or its end."""
NEAR = 2**12

Force = Annotated[
    bool,
    typer.Option("--force", help="Overwrite a file that the lab did not make."),
]


def check_output(option: str, path: Path, force: bool) -> None:
    """Check that a file may be written.

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
    if not force and not _is_own(path):
        raise ValueError(
            f"{option}={path}: is there, and the lab did not make it; choose another name, or "
            "--force overwrites it"
        )


def _is_own(path: Path) -> bool:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            start = file.read(NEAR)
            file.seek(max(0, os.fstat(file.fileno()).st_size - NEAR))
            return MARK in start or MARK in file.read()
    except OSError:
        return False

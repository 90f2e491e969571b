"""Files that a user names for output: nothing that the lab did not make is overwritten."""

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from lab.files import is_marked

Force = Annotated[
    bool,
    typer.Option("--force", help="Overwrite a file that the lab did not make."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
AsJsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]


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

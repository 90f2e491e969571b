"""Modules that a user names: installed ones, or files of the working directory."""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType


def import_module(name: str) -> ModuleType:
    """Import a module; the working directory is searched last.

    It comes after all packages, so that no file there can take the place of one that the lab needs.
    It stays on the path, since the user's code may import its neighbours later.

    Raises:
        ImportError: when there is no such module, or a package hides the file of that name.
        Exception: whatever the module raises.
    """
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    module = importlib.import_module(name)
    own = Path(folder, *name.split("."))
    for file in (own / "__init__.py", own.with_suffix(".py")):
        if file.exists() and not (module.__file__ and file.samefile(module.__file__)):
            raise ImportError(
                f"{file} is hidden by {module.__file__ or name}; rename it or set PYTHONPATH=."
            )
    return module

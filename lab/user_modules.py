"""Modules that a user names: installed ones, or files of the working directory."""

import hashlib
import importlib
import importlib.machinery
import inspect
import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from tasks.near_names import ask, find_near


class _UserFinder:
    """Finds modules in a folder of the user, after all others, for the code of that folder only.

    So no file there takes the place of one that the lab or its libraries would do without.
    """

    def __init__(self, folder: str):
        self.folder = folder
        self.asked = ""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module of the folder is, if the user or the folder's code asks for it."""
        if path is not None or not (name == self.asked or self._asks()):
            return None
        return PathFinder.find_spec(name, [self.folder], target)

    def _asks(self) -> bool:
        """Whether the code that imports is in the folder."""
        frame = sys._getframe(2)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        file = "" if frame is None else frame.f_globals.get("__file__") or ""
        # Packages may be installed below the folder, as in a virtual environment.
        homes = [os.path.join(os.path.abspath(home), "") for home in sys.path if home]
        file = os.path.abspath(file) if file else ""
        return file.startswith(os.path.join(self.folder, "")) and not file.startswith(tuple(homes))


def import_module(name: str) -> ModuleType:
    """Import a module; the working directory is searched last.

    It comes after all packages, so that no file there can take the place of one that the lab needs.
    The user's code finds its neighbours later, too.

    Raises:
        ImportError: when there is no such module, or a package hides the file of that name.
        Exception: whatever the module raises.
    """
    folder = os.getcwd()
    finder = next(
        (f for f in sys.meta_path if isinstance(f, _UserFinder) and f.folder == folder), None
    )
    if finder is None:
        finder = _UserFinder(folder)
        sys.meta_path.append(finder)  # type: ignore[arg-type]
    importlib.invalidate_caches()
    finder.asked = name.partition(".")[0]
    try:
        module = importlib.import_module(name)
    finally:
        finder.asked = ""
    own = Path(folder, *name.split("."))
    for file in (own / "__init__.py", own.with_suffix(".py")):
        if file.exists() and not (module.__file__ and file.samefile(module.__file__)):
            raise ImportError(
                f"{file} is hidden by {module.__file__ or name}; rename it or set PYTHONPATH=."
            )
    return module


def import_object(module: str, name: str) -> Any:
    """Import a module and return what it calls by a name, which may have dots.

    Raises:
        ModuleNotFoundError: for an unknown module; asks whether a near one was meant.
        AttributeError: likewise for an unknown name.
        Exception: as `import_module`.
    """
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        near = ask(_find_near_modules(module, error.name or ""))
        raise ModuleNotFoundError(f"{error}. {near}" if near else str(error)) from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            near = ask(find_near(part, [name for name in dir(found) if name[0] != "_"]))
            raise AttributeError(f"{error}. {near}" if near else str(error)) from error
    return found


def digest_source(path: str) -> str | None:
    """Return a digest of the files that define "module:Class"; None where it does not import.

    They are the module's file, and those of the modules it uses that lie in its folder or below.
    """
    name, _, cls = path.partition(":")
    try:
        first = import_module(name)
        if getattr(first, "__file__", None) is None:  # a notebook's own
            return hashlib.sha256(inspect.getsource(getattr(first, cls)).encode()).hexdigest()
    except (Exception, SystemExit):  # whoever builds the model reports it
        return None
    home, files, left = Path(first.__file__ or "").parent, set[Path](), [first]
    while left:
        module = left.pop()
        file = Path(getattr(module, "__file__", None) or "")
        if file in files or file.suffix != ".py" or not file.is_relative_to(home):
            continue
        files.add(file)
        for value in vars(module).values():
            name = value.__name__ if isinstance(value, ModuleType) else _find_module(value)
            if name in sys.modules:
                left.append(sys.modules[name])
    contents = [(str(file.relative_to(home)), file.read_bytes()) for file in sorted(files)]
    return hashlib.sha256(repr(contents).encode()).hexdigest()


def _find_module(value: object) -> str:
    """Return the name of the module that defines a class or a function; "" for anything else."""
    name = getattr(value, "__module__", "")
    return name if isinstance(name, str) else ""


def _find_near_modules(asked: str, missing: str) -> list[str]:
    """Return modules near the one that is missing on the way to a module that was asked for."""
    if not f"{asked}.".startswith(f"{missing}."):
        return []  # it is missing to the module itself
    package, _, name = missing.rpartition(".")
    inside = getattr(sys.modules.get(package), "__path__", ())  # none if it is not a package
    places = inside if package else [*sys.path, os.getcwd()]
    known = {found.name for found in pkgutil.iter_modules(places) if found.name[0] != "_"}
    return [f"{package}.{near}".lstrip(".") for near in find_near(name, known)]

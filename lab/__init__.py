"""Small sequence models on synthetic tasks: layers, training, and what they learned.

Axis letters, used in every shape of this package:

    b batch          t target time    s source time    c chunk       l within chunk
    d model          h head           p head dim       n state       g group
    e expert         k chosen         r retrieval      v vocabulary  q scored position

The paper's symbols keep their case: A, B, C, D, dt, L, M.

What a user calls is in `lab.api` and `lab.laws`. It is imported on first use, so that `import lab`
takes no time.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "AnalyzeOptions": "lab.api.options",
    "analyze": "lab.api.run",
    "certify": "lab.laws",
    "open": "lab.api.run",
    "profile": "lab.api.profiling",
    "sweep": "lab.api.sweeping",
    "train": "lab.api.training",
}
"""The modules of the names that are imported when they are used; `__init__.pyi` has their types."""


def _check_found(package: str) -> None:
    """Raise an ImportError that says what hides a package of the lab, such as the user's file."""
    found = find_spec(package)
    if found is None or found.origin is None:
        return
    if found.origin != os.path.join(os.path.dirname(__path__[0]), package, "__init__.py"):
        raise ImportError(
            f"{found.origin} hides the package {package} of wonderful-lab: rename it, or run "
            "Python elsewhere",
            name=package,
            path=found.origin,
        )


if sys.argv[:1] != ["-m"]:  # with `python -m lab`, `__main__` leaves the working directory out
    _check_found("tasks")  # which all of the lab needs


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lab' has no attribute {name!r}")
    _check_found("analysis")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(["__version__", *_HOMES])

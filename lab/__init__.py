"""Small sequence models on synthetic tasks: layers, training, and what they learned.

Axis letters, used in every shape of this package:

    b batch          t target time    s source time    c chunk       l within chunk
    d model          h head           p head dim       n state       g group
    e expert         k chosen         r retrieval      v vocabulary  q scored position

The paper's symbols keep their case: A, B, C, D, dt, L, M.

`lab.certify`, `lab.open`, `lab.sweep` and `lab.train` are imported on first use, so that
`import lab` takes no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lab.laws import certify as certify
    from lab.notebook import open as open
    from lab.notebook import sweep as sweep
    from lab.notebook import train as train

__version__ = "0.1.0"

_HOMES = {"certify": "lab.laws", **dict.fromkeys(("open", "sweep", "train"), "lab.notebook")}
"""The modules of the names that are imported when they are used."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lab' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(["__version__", *_HOMES])

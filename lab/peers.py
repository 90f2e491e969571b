"""Optional packages: kernels for `lab.ops`, and public implementations that tests compare with.

No other module imports them directly; `load` imports one when it is needed.
"""

import importlib
import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType

from tasks.bounds import check_choice

PEERS = {
    "mamba_ssm": "mamba-ssm",
    "fla": "flash-linear-attention",
    "transformers": "transformers",
    "PEER_pytorch": "PEER-pytorch",
    "triton": "triton",
}
"""Import name → package name."""

_WARNINGS_AT_IMPORT = {
    # fla warns on every machine without a GPU; its pure-torch forms need none.
    r"Triton is not supported on current platform": UserWarning,
    # From each of fla's layers, about an attention kernel that nothing here calls.
    r"Flash Attention is not installed": ImportWarning,
    # From mamba-ssm under torch.use_deterministic_algorithms, about the sizes of CUDA kernels.
    r"Deterministic mode: set TRITON_CACHE_AUTOTUNING=1": UserWarning,
    # fla and transformers use what torch has since deprecated.
    r"`torch\.jit\.script(_method)?` is deprecated": DeprecationWarning,
}


class MissingPeerError(ValueError):
    """An optional package is not installed; the message says how to install it."""


def load(module: str) -> ModuleType:
    """Return a module of an optional package, by its dotted name.

    >>> load("torchvision")
    Traceback (most recent call last):
    ValueError: package='torchvision' must be one of ...

    Args:
        module: dotted name, beginning with a name of `PEERS`.

    Raises:
        MissingPeerError: for a package that is not installed.
        ValueError: for one that is not in `PEERS`; lists the known.
    """
    package = module.partition(".")[0]
    missing = explain_missing(package)
    if missing is not None:
        raise MissingPeerError(missing)
    bare = _replace_mamba_ssm() if package == "mamba_ssm" else nullcontext()
    with warnings.catch_warnings(), bare:
        for message, category in _WARNINGS_AT_IMPORT.items():
            warnings.filterwarnings("ignore", message, category)
        return importlib.import_module(module)


def explain_missing(package: str) -> str | None:
    """Return how to install a package of `PEERS`; None if it is installed.

    Raises:
        ValueError: for a package that is not in `PEERS`; lists the known.
    """
    check_choice("package", package, PEERS)
    if importlib.util.find_spec(package) is not None:
        return None
    name = PEERS[package]
    return f"{name} is not installed: `pip install {name}`, or `make development` in a checkout"


def version(package: str) -> str:
    """Return an installed package's version.

    Raises:
        ValueError: as `load`.
    """
    missing = explain_missing(package)
    if missing is not None:
        raise ValueError(missing)
    return importlib.metadata.version(PEERS[package])


@contextmanager
def _replace_mamba_ssm() -> Iterator[None]:
    """Make mamba_ssm's modules importable where its CUDA extension was not compiled.

    Its top level imports the extension, which only its first selective scan needs, not the Triton
    kernels and torch forms of state space duality. An empty package replaces the top level while
    they are imported, and no longer: transformers calls mamba_ssm's kernels, even on a CPU, once
    it finds the package.
    """
    name = "mamba_ssm"
    if importlib.util.find_spec("selective_scan_cuda") is not None:
        yield
        return
    spec = importlib.util.find_spec(name)
    assert spec is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        yield
    finally:
        del sys.modules[name]

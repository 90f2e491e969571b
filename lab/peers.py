"""Optional packages: kernels that `lab.ops` may run on, and public forms that tests compare with.

No other module imports them; what needs one asks here, when it needs it.
"""

import importlib
import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType

PEERS = {
    "mamba_ssm": "mamba-ssm",
    "fla": "flash-linear-attention",
    "transformers": "transformers",
    "PEER_pytorch": "PEER-pytorch",
    "triton": "triton",
}
"""Name to import → name of the package that brings it."""

_SAID_AT_IMPORT = {
    # fla says so on every machine without a GPU; its pure-torch forms need none.
    r"Triton is not supported on current platform": UserWarning,
    # fla's layers say it, once each, of the one attention kernel that nothing here calls.
    r"Flash Attention is not installed": ImportWarning,
    # mamba-ssm's, under torch.use_deterministic_algorithms: how it picks the sizes of CUDA kernels.
    r"Deterministic mode: set TRITON_CACHE_AUTOTUNING=1": UserWarning,
    # fla's and transformers' use of what torch has since deprecated.
    r"`torch\.jit\.script(_method)?` is deprecated": DeprecationWarning,
}


class MissingPeerError(ValueError):
    """An optional package is not installed; the message says how to install it."""


def load(module: str) -> ModuleType:
    """Return a module of an optional package, by its dotted name.

    >>> load("mamba_ssm.modules.ssd_minimal").ssd_minimal_discrete

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
        for message, category in _SAID_AT_IMPORT.items():
            warnings.filterwarnings("ignore", message, category)
        return importlib.import_module(module)


def explain_missing(package: str) -> str | None:
    """Return how to install a package of `PEERS` that is not there, None for one that is.

    Raises:
        ValueError: for a package that is not in `PEERS`; lists the known.
    """
    if package not in PEERS:
        raise ValueError(f"{package=} must be one of {', '.join(PEERS)}")
    if importlib.util.find_spec(package) is not None:
        return None
    return f"{PEERS[package]} is not installed: `make peers` installs it"


def version(package: str) -> str:
    """Return an installed package's version, for records.

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

    Its top level imports the extension, which only its first selective scan needs: neither the
    Triton kernels nor the torch forms of state space duality do. A bare package in the top
    level's place leads to them, while they are imported and no longer: transformers, if it finds a
    mamba_ssm to import, calls its kernels for good, on a CPU too.
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

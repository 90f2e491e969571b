"""Connecting to a Ray cluster: by its address, with its token."""

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import IO

from lab.files import shorten_message
from lab.sweeps.afterwards import say_if_killed
from lab.sweeps.cluster import Cluster, knock

REFUSED = b"InvalidAuthToken"
"""Ray's word for a missing or wrong token, which its exception does not mention."""
SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # What Ray says about workers that it lost would go between the lines of the sweep.
    "RAY_BACKEND_LOG_LEVEL": "error",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "^",
}
"""Environment variables for Ray, unless the user has set them."""
LAST_WORDS = (
    "Error: this process was killed. If the cluster at {address} is gone, Ray did it: start the "
    "cluster again; the same command goes on"
)
"""Printed if Ray kills this process, as it does some time after its head node has gone."""
HERE = ("local", "auto")
"""Values of --ray besides addresses: a new cluster for this sweep, and the one of this machine."""


@contextmanager
def connect(address: str) -> Iterator[Cluster]:
    """Connect to a cluster for the length of a `with` block.

    Args:
        address: HOST:PORT of its head; or as Ray has it, "auto" for one that runs on this machine,
            "local" for a new one on it that ends with the block and listens on loopback only.

    Raises:
        ValueError: without Ray, when no cluster answers there, or when it refuses the token.
    """
    if importlib.util.find_spec("ray") is None:
        raise ValueError(
            f"ray={address}: needs Ray, which is not installed: pip install 'ray>=2.52' (or the "
            "extra wonderful-lab[cluster])"
        )
    _check_address(address)
    for name, value in SETTINGS.items():  # before Ray is imported, which reads them
        os.environ.setdefault(name, value)
    if address == "local":
        # Ray's name for: the address of this node is that of its loopback interface.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray
    from ray.exceptions import AuthenticationError

    with TemporaryFile() as heard:
        try:
            with _divert_errors(heard):
                ray.init(
                    address,
                    include_dashboard=False if address == "local" else None,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
        except (AuthenticationError, ConnectionError, RuntimeError, ValueError) as error:
            heard.seek(0)
            refused = isinstance(error, AuthenticationError) or REFUSED in heard.read()
            raise ValueError(f"ray={address}: {_explain(error, refused)}") from error
    try:
        with say_if_killed(LAST_WORDS.format(address=address)):
            yield Cluster(address)
    finally:
        ray.shutdown()


@contextmanager
def _divert_errors(file: IO[bytes]) -> Iterator[None]:
    """Write what Ray's own processes and threads print on stderr to a file, for a `with` block."""
    sys.stderr.flush()
    before = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def _explain(error: Exception, refused: bool) -> str:
    if refused:
        return (
            "the cluster wants another token than that of RAY_AUTH_TOKEN, of the file "
            "RAY_AUTH_TOKEN_PATH or of ~/.ray/auth_token"
        )
    if isinstance(error, ConnectionError):
        return f"no cluster answers there: {shorten_message(error)}"
    return shorten_message(error)


def _check_address(address: str) -> None:
    """Check that something listens at an address, which Ray would wait for half a minute.

    Raises:
        ValueError: for no address, one of Ray Client, or one where nothing answers.
    """
    if address in HERE:
        return
    try:
        knock(address)
    except ValueError as error:
        raise ValueError(
            f"ray={address}: must be HOST:PORT of the head node, auto, or local; run the command "
            "on a node of the cluster"
        ) from error
    except (OSError, OverflowError) as error:
        raise ValueError(f"ray={address}: no cluster answers there: {error}") from error

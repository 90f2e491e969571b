"""Whether a run names code or text by a command of this user, or comes from someone else.

A run's config.json may name a class to import and a text to read. Whoever unpacks a stranger's run
did not choose them. So the lab signs what a command of its user named, with a key that only the
user can read; a run without the signature is opened only if the user says so.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import platformdirs

BYTES = 32


def list_named(config: Mapping[str, Any]) -> list[str]:
    """Return what the content of a config.json has imported and read, in words."""
    model, task = (config.get(part) for part in ("model", "task"))
    code = model.get("model") if isinstance(model, Mapping) else None
    text = task.get("path") if isinstance(task, Mapping) else None
    found = [] if code is None else [f"import and run {code}"]
    return found if text is None else [*found, f"read the text {text}"]


def sign(config: Mapping[str, Any]) -> str | None:
    """Return a signature of what a config.json names; None if it names nothing, or without a key.

    It holds for this user on this machine, wherever the run folder is moved to.
    """
    named, key = list_named(config), _read_key()
    if not named or key is None:
        return None
    return hmac.new(key, json.dumps(named).encode(), hashlib.sha256).hexdigest()


def is_trusted(config: Mapping[str, Any], signature: object) -> bool:
    """Whether a config.json names nothing, or what a command of this user named."""
    if not list_named(config):
        return True
    expected = sign(config)
    return (
        isinstance(signature, str)
        and signature.isascii()
        and expected is not None
        and hmac.compare_digest(expected, signature)
    )


def ask_for_trust(what: object, named: Sequence[str], how: str = "--trust") -> str:
    """Say in one line what a run or a file would do, and how to allow it."""
    return (
        f"{what}: is not known to come from a command of yours, and would {' and '.join(named)}; "
        f"{how} allows that"
    )


def find_key() -> Path:
    """Return the file of the user's key."""
    return Path(platformdirs.user_data_dir("wonderful-lab")) / "key"


def _read_key() -> bytes | None:
    """Return the user's key, made at its first use; None where none can be kept."""
    file = find_key()
    try:
        if not file.exists() or file.stat().st_size != BYTES:
            _make_key(file)
        key = file.read_bytes()
    except OSError:
        return None
    return key if len(key) == BYTES else None


def _make_key(file: Path) -> None:
    """Make a key that is there whole or not at all; one that another process has made stays.

    Raises:
        OSError: where none can be kept.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    damaged, new = file.exists(), file.with_name(f".{secrets.token_hex(8)}.writing")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(secrets.token_bytes(BYTES))
            stream.flush()
            os.fsync(stream.fileno())
        if damaged:
            os.replace(new, file)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(new, file)
    finally:
        new.unlink(missing_ok=True)

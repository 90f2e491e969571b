"""Weights kept during training, so that analysis can see how a run learned.

    history/step-N.safetensors    the model's weights after N steps; step 0 is drawn from the seed

They cannot resume a run, since that also takes the optimizer's state (`lab.training.checkpoint`).
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from lab.files import RunError, shorten_message
from lab.folder import Folder
from lab.models import LanguageModel

POWERS = frozenset(round(2 ** (k / 2)) for k in range(128))
"""Steps after which weights are always kept: the powers of √2, rounded."""
RISE = 1 / 16
"""Rise of the running accuracy from one kept step to the next, so there are at most 16 such."""
FILE = re.compile(r"step-(\d{1,18})\.safetensors", re.ASCII)
DIGEST = "sha256"
"""The entry of a file's metadata that holds the digest of its weights."""
HEADER = 2**24
"""More bytes than names and shapes take in a file."""
MEMORY = 0.9
"""Decay of the running accuracy per step: it follows within about ten steps."""


class WeightsSchedule:
    """Decides after which steps weights are kept: powers of √2, and more during a jump.

    A jump is a rise of the running mean of the training accuracy above its highest value so far, so
    a noisy accuracy does not fill the disk. `update` must be called for every step, including those
    before a resume, so that interruptions do not change which weights are kept.
    """

    def __init__(self) -> None:
        self._running: float | None = None
        self._highest = 0.0

    def update(self, step: int, accuracy: float) -> bool:
        """Take in a step; return whether the weights after it are to be kept."""
        old = accuracy if self._running is None else self._running
        self._running = MEMORY * old + (1 - MEMORY) * accuracy
        if self._running < self._highest + RISE and step not in POWERS:
            return False
        self._highest = max(self._highest, self._running)
        return True


def list_weights(run: Path) -> dict[int, Path]:
    """Return the files of a run folder by step, oldest first."""
    names = (FILE.fullmatch(name) for name in Folder(run).list("history"))
    return {int(name[1]): run / "history" / name[0] for name in names if name}


def save(run: Path, step: int, model: LanguageModel) -> None:
    """Write the weights after a step, unless one is not finite.

    Raises:
        OSError: when they cannot be written; nothing half-written stays.
    """
    weights = model.weights()
    if not all(w.isfinite().all() for w in weights.values()):
        return
    folder = Folder(run)
    folder.make("history")
    digest = {DIGEST: digest_tensors(weights)}
    data = safetensors.torch.save(weights, metadata=digest)
    folder.write(f"history/step-{step:08d}.safetensors", data)


def restore(file: Path, model: LanguageModel) -> LanguageModel:
    """Load the weights in a file into a model and return it.

    Files of older versions of the lab hold no digest.

    Raises:
        RunError: when they are missing, truncated, changed, or of another model.
    """
    folder = Folder(file.parent.parent)
    try:
        data = folder.read(f"{file.parent.name}/{file.name}", bound_file(model))
        weights, digest = safetensors.torch.load(data), _read_digest(data)
        if digest not in (None, digest_tensors(weights)):
            raise RunError(f"{file}: was changed or damaged since it was written; remove it")
        model.load_state_dict(weights)
    except OSError as error:
        raise RunError(f"{file}: {error.strerror}") from error
    except SafetensorError as error:
        raise RunError(f"{file}: truncated, or no weights: {error}; remove it") from error
    except (RuntimeError, KeyError, ValueError) as error:
        raise RunError(f"{file}: does not fit its run: {shorten_message(error)}") from error
    return model


def bound_file(model: LanguageModel) -> int:
    """Return more bytes than a file of the weights of a model, or of their moments, can have."""
    return 4 * sum(tensor.nbytes for tensor in model.state_dict().values()) + HEADER


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 digest of tensors: of names, dtypes, shapes and values."""
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        about = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
        whole.update(about.encode() + b"\0")
        whole.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return whole.hexdigest()


def _read_digest(data: bytes) -> str | None:
    """Return the digest in the header of a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    return (json.loads(data[8 : 8 + size]).get("__metadata__") or {}).get(DIGEST)


def rewind(run: Path, step: int) -> None:
    """Delete the weights of later steps, which will be taken again.

    Raises:
        OSError: when a file cannot be removed.
    """
    for later, file in list_weights(run).items():
        if later > step:
            Folder(run).remove(f"history/{file.name}")

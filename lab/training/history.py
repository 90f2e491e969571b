"""Weights kept during training, so that analysis can see how a run learned.

    history/step-N.safetensors    the model's weights after N steps; step 0 is drawn from the seed

They cannot resume a run, since that also takes the optimiser's state (`lab.training.checkpoint`).
"""

from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError

from lab.files import RunError, shorten_message, write
from lab.models import LanguageModel

POWERS = frozenset(round(2 ** (k / 2)) for k in range(128))
"""Steps after which weights are always kept: the powers of √2, rounded."""
RISE = 1 / 16
"""Rise of the running accuracy from one kept step to the next, so there are at most 16 such."""
MEMORY = 0.9
"""Decay of the running accuracy per step: it follows within about ten steps."""


class Pace:
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
    numbered = (
        (path.stem.removeprefix("step-"), path)
        for path in (run / "history").glob("step-*.safetensors")
    )
    return dict(sorted((int(step), path) for step, path in numbered if step.isdecimal()))


def save(run: Path, step: int, model: LanguageModel) -> None:
    """Write the weights after a step, unless one is not finite.

    Raises:
        OSError: when they cannot be written; nothing half-written stays.
    """
    weights = model.weights()
    if not all(w.isfinite().all() for w in weights.values()):
        return
    file = run / "history" / f"step-{step:08d}.safetensors"
    file.parent.mkdir(exist_ok=True)
    write(file, safetensors.torch.save(weights))


def restore(file: Path, model: LanguageModel) -> LanguageModel:
    """Load the weights in a file into a model and return it.

    Raises:
        RunError: when they are missing, truncated, or of another model.
    """
    try:
        model.load_state_dict(safetensors.torch.load(file.read_bytes()))
    except OSError as error:
        raise RunError(f"{file}: {error.strerror}") from error
    except SafetensorError as error:
        raise RunError(f"{file}: truncated, or no weights: {error}; remove it") from error
    except RuntimeError as error:
        raise RunError(f"{file}: does not fit its run: {shorten_message(error)}") from error
    return model


def rewind(run: Path, step: int) -> None:
    """Delete the weights of later steps, which will be taken again.

    Raises:
        OSError: when a file cannot be removed.
    """
    for later, file in list_weights(run).items():
        if later > step:
            file.unlink()

"""Weights kept along the way, so that analysis can see how a run came to what it learned.

    history/step-N.safetensors    the model's weights after N steps; step 0 is drawn from the seed

They are not for resuming: a checkpoint has the optimiser's state too (`lab.training.checkpoint`).
"""

from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError

from lab.files import RunError, shorten_message, write
from lab.models import LanguageModel

POWERS = frozenset(round(2 ** (k / 2)) for k in range(128))
"""Steps after which weights are always kept: the powers of √2, to whole steps."""
RISE = 1 / 16
"""How far the running accuracy climbs from one kept step to the next; there are 16 such at most."""
MEMORY = 0.9
"""What the running accuracy keeps of itself at a step: it follows within some ten steps."""


class Pace:
    """Says after which steps weights are kept: powers of √2, and more of them during a jump.

    A jump is a climb of the running mean of the training accuracy beyond all it was before, so
    that a noisy accuracy does not fill the disk. It must be told of every step, of those before a
    resume too: then what is kept does not depend on interruptions.
    """

    def __init__(self) -> None:
        self._running: float | None = None
        self._highest = 0.0

    def update(self, step: int, accuracy: float) -> bool:
        """Return whether the weights after this step are to be kept."""
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
    """Write the weights after a step, unless one is not finite: of such there is nothing to learn.

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
    """Give a model the weights in a file; returns it.

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
    """Drop what is kept of later steps: they will be taken again.

    Raises:
        OSError: when a file cannot be removed.
    """
    for later, file in list_weights(run).items():
        if later > step:
            file.unlink()

"""The weights of a run on the disk: checkpoints to go on from, and weights kept for analysis.

    checkpoint/step-N/    model.safetensors, optimizer.safetensors, state.json with their digests
    history/step-N.safetensors    the weights after N steps; step 0 is drawn from the seed

A checkpoint is renamed into place when it is complete. Loading unpickles nothing.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import safetensors.torch
import torch
from pydantic import Field, with_config
from safetensors import SafetensorError
from torch import Tensor
from typing_extensions import TypedDict

from lab.constructions import construct
from lab.files import (
    RunError,
    clear_leftovers,
    explain_write_errors,
    find_inside,
    new_folder,
    own,
    read,
    read_json,
    remove,
    shorten_message,
    write,
    write_json,
)
from lab.lengthening import list_stages
from lab.machine import check_fits, explain_lack_of_memory
from lab.models import LanguageModel, build
from lab.training.loop import Annealing, DivergedError, TrainingState, start
from lab.training.records import STRICT, Count, Share, validate
from lab.training.run import CHECKPOINT, FORMAT, HISTORY, STATE, Run
from tasks.base import MAX_ROWS

FILES = ("model", "optimizer")
COUNTERS = ("step", "rows", "stage", "stage_step", "threads")
AGAIN = (
    "--fresh begins the run again; history/ has earlier weights, which `lab analyze --step` reads"
)
POWERS = frozenset(round(2 ** (k / 2)) for k in range(128))
"""Steps after which weights are always kept: the powers of √2, rounded."""
RISE = 1 / 16
"""Rise of the running accuracy from one kept step to the next, so there are at most 16 such."""
MEMORY = 0.9
"""Decay of the running accuracy per step: it follows within about ten steps."""
DIGEST = "sha256"
"""The entry of a file's metadata that holds the digest of its weights."""
HEADER = 2**24
"""More bytes than names and shapes take in a file."""


@with_config(STRICT)
class AnnealingEntry(TypedDict):
    """What `lab.training.loop.Annealing` has seen."""

    wrong: Share
    least: Share
    waits: Count
    halvings: Count


@with_config(STRICT)
class StateFile(TypedDict):
    """The content of a checkpoint's state.json."""

    format: Count
    step: Count
    rows: Annotated[int, Field(ge=0, le=MAX_ROWS)]
    stage: Count
    stage_step: Count
    first_loss: float | None
    precision: Literal["fp32", "bf16"]
    threads: Count
    annealing: AnnealingEntry
    sha256: dict[str, str]


def build_model(run: Run) -> LanguageModel:
    """Return a run's model with its initial weights.

    Raises:
        ValueError: for a model that cannot be built, that memory does not hold, or for which
            there is no construction.
    """
    config, sizes, seed = run.model, run.task.sizes, run.train.seed
    said = ", ".join(f"{name}={size}" for name, size in sizes.items())
    what = f"d_model={config.d_model}, {said}, {config.stack}"
    check_fits(what, (sum(sizes.values()) + config.d_model) * config.d_model)
    with explain_lack_of_memory(what):
        if run.train.init == "oracle":
            return construct(run.task, config, seed)
        return build(**config.to_dict(), **sizes, seed=seed)


def save_checkpoint(run: Run, state: TrainingState) -> None:
    """Write a checkpoint unless it exists, then drop those before it.

    Raises:
        DivergedError: when a weight is not finite.
        RunError: when it cannot be written; the checkpoint before it is still there.
    """
    with explain_write_errors(run.path):
        if state.step not in run.list_checkpoints():
            _write(run, state)
        keep_only(run, state.step)


def _write(run: Run, state: TrainingState) -> None:
    if name := find_not_finite(state.model, state.model.state_dict()):
        raise DivergedError(f"{name} is not finite after step {state.step}")
    home = find_inside(run.path, CHECKPOINT)
    clear_leftovers(home)
    with new_folder(home / f"step-{state.step:08d}") as folder:
        digests = {}
        # One after the other, so that memory does not hold both.
        for name, collect in zip(FILES, (_copy_weights, _flatten_moments), strict=True):
            data = safetensors.torch.save(collect(state))
            write(folder / f"{name}.safetensors", data)
            digests[name] = hashlib.sha256(data).hexdigest()
            del data
        content = {
            "format": FORMAT,
            **{name: getattr(state, name) for name in COUNTERS},
            "first_loss": state.first_loss,
            "precision": state.precision,
            "annealing": asdict(state.annealing),
            "sha256": digests,
        }
        write_json(folder / STATE, content)


def keep_only(run: Run, step: int) -> None:
    """Delete all checkpoints but that of a step, as far as the system allows."""
    others = [path for known, path in run.list_checkpoints().items() if known != step]
    if not others:
        return
    with own(run.path / CHECKPOINT) as unread:  # while an analysis reads them, they stay
        for path in others if unread else ():
            with contextlib.suppress(OSError):
                remove(path)


def load_state(run: Run, device: torch.device | str, step: int | None = None) -> TrainingState:
    """Return the state of a checkpoint, or the initial one, as `Run.load_state`.

    Raises:
        RunError: when the checkpoint is missing, truncated, tampered with, or does not fit, or the
            model cannot be built.
    """
    try:
        state = start(run.build().to(device), run.train)
    except ValueError as error:
        raise RunError(f"{run.path}: {error}") from error
    known = run.list_checkpoints()
    if step is None and not known:
        return state
    step = max(known) if step is None else step
    if step not in known:
        raise RunError(f"{run.path}: no checkpoint of step {step}; has {list(known) or 'none'}")
    home = known[step]
    content = read_json(home / STATE, f"checkpoint {home} is incomplete; {AGAIN}")
    if content.get("format") != FORMAT:
        raise RunError(
            f"checkpoint {home}: format {content.get('format')}, this lab reads {FORMAT}"
        )
    kept = validate(StateFile, content, f"checkpoint {home}, state.json; {AGAIN}")
    if kept["step"] != step or kept["stage_step"] > step:
        raise RunError(f"checkpoint {home}: the counts in state.json are impossible; {AGAIN}")
    stages = len(list_stages(run.task, run.train))
    if kept["stage"] >= stages:
        raise RunError(f"checkpoint {home}: is of stage {kept['stage']}, this run has {stages}")
    weights, moments = (_read_tensors(home, name, kept, state.model) for name in FILES)
    if name := find_not_finite(state.model, weights):
        raise RunError(f"checkpoint {home}: {name} is not finite; {AGAIN}")
    try:
        state.model.load_state_dict(weights)
        _load_moments(state, moments)
    except (RuntimeError, KeyError, ValueError) as error:
        raise RunError(
            f"checkpoint {home} does not fit its run: {shorten_message(error)}"
        ) from error
    for name in (*COUNTERS, "first_loss", "precision"):
        setattr(state, name, kept[name])
    state.annealing = Annealing(**kept["annealing"])
    return state


def _copy_weights(state: TrainingState) -> dict[str, Tensor]:
    return state.model.weights()


def _flatten_moments(state: TrainingState) -> dict[str, Tensor]:
    flat = {}
    for name, optimizer in state.optimizers.items():
        for index, moments in optimizer.state_dict()["state"].items():
            for key, value in moments.items():
                flat[f"{name}/{index}/{key}"] = torch.as_tensor(value).cpu().contiguous()
    return flat


def _load_moments(state: TrainingState, flat: dict[str, Tensor]) -> None:
    nested: dict[str, dict[int, dict[str, Tensor]]] = {name: {} for name in state.optimizers}
    for path, value in flat.items():
        name, index, key = path.split("/")
        nested[name].setdefault(int(index), {})[key] = value
    for name, optimizer in state.optimizers.items():
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": nested[name], "param_groups": groups})


def _read_tensors(
    home: Path, name: str, kept: StateFile, model: LanguageModel
) -> dict[str, Tensor]:
    file = home / f"{name}.safetensors"
    try:
        data = read(file, _bound_file(model))
    except OSError as error:
        raise RunError(f"checkpoint {file}: {error.strerror}; {AGAIN}") from error
    if hashlib.sha256(data).hexdigest() != kept["sha256"].get(name):
        raise RunError(
            f"checkpoint {file}: digest differs from state.json's: truncated or changed since it "
            f"was written; {AGAIN}"
        )
    try:
        return safetensors.torch.load(data)
    except SafetensorError as error:  # with a digest that fits, as a stranger can make it
        raise RunError(f"checkpoint {file}: holds no tensors: {error}; {AGAIN}") from error


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


def keep_weights(run: Run, step: int, model: LanguageModel) -> None:
    """Keep the weights after a step for analysis, unless one is not finite.

    Raises:
        RunError: when they cannot be written; nothing half-written stays.
    """
    weights = model.weights()
    if find_not_finite(model, weights):
        return
    data = safetensors.torch.save(weights, metadata={DIGEST: digest_tensors(weights)})
    with explain_write_errors(run.path):
        home = find_inside(run.path, HISTORY)
        home.mkdir(exist_ok=True)
        write(home / f"step-{step:08d}.safetensors", data)


def load_model(run: Run, step: int) -> LanguageModel:
    """Return a run's model as it was after a step, as `Run.load_model`.

    Raises:
        RunError: when there are no such weights, they cannot be read or do not fit, or the model
            cannot be built.
    """
    if step not in run.list_steps():
        known = ", ".join(map(str, run.list_steps()))
        raise RunError(f"{run.path}: no weights of step {step}; has {known}")
    if step in run.list_checkpoints():
        return load_state(run, "cpu", step).model.eval()
    try:
        model = run.build().eval()
    except ValueError as error:
        raise RunError(f"{run.path}: {error}") from error
    file = run.list_kept_weights().get(step)
    if file is None:
        return model
    try:
        data = read(file, _bound_file(model))
        weights = safetensors.torch.load(data)
        if _read_digest(data) != digest_tensors(weights):
            raise RunError(f"{file}: was changed or damaged since it was written; remove it")
        if name := find_not_finite(model, weights):
            raise RunError(f"{file}: {name} is not finite; remove it")
        model.load_state_dict(weights)
    except OSError as error:
        raise RunError(f"{file}: {error.strerror}") from error
    except SafetensorError as error:
        raise RunError(f"{file}: truncated, or no weights: {error}; remove it") from error
    except (RuntimeError, KeyError, ValueError) as error:
        raise RunError(f"{file}: does not fit its run: {shorten_message(error)}") from error
    return model


def find_not_finite(model: LanguageModel, weights: Mapping[str, Tensor]) -> str:
    """Return the name of the first parameter whose weights are not finite; "" if all are."""
    names = (name for name, _ in model.named_parameters() if name in weights)
    return next((name for name in names if not weights[name].isfinite().all()), "")


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


def _bound_file(model: LanguageModel) -> int:
    """Return more bytes than a file of the weights of a model, or of their moments, can have."""
    return 4 * sum(tensor.nbytes for tensor in model.state_dict().values()) + HEADER

"""Checkpoints: one folder a step, renamed into place when complete; digests reveal changes."""

import contextlib
import hashlib
import re
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from lab.files import FORMAT, RunError, shorten_message
from lab.folder import Folder
from lab.training.annealing import Annealing
from lab.training.divergence import DivergedError
from lab.training.history import bound_file
from lab.training.schema import StateFile, validate
from lab.training.state import TrainingState
from tasks.base import MAX_ROWS

HOME, STATE = "checkpoint", "state.json"
NAME = re.compile(r"step-(\d{1,18})", re.ASCII)
FILES = ("model", "optimizer")
COUNTERS = ("step", "rows", "stage", "stage_step")
AGAIN = (
    "remove the checkpoint folder, metrics.jsonl and result.json to begin again; history/ has "
    "earlier weights, which `lab analyze --step` reads"
)


def list_checkpoints(run: Path) -> dict[int, Path]:
    """Return the checkpoint folders of a run folder by step, oldest first.

    One without its state is what is left of a checkpoint that was being removed.
    """
    folder = Folder(run)
    names = (NAME.fullmatch(name) for name in folder.list(HOME))
    found = {int(name[1]): run / HOME / name[0] for name in names if name}
    return {
        step: path
        for step, path in sorted(found.items())
        if folder.exists(f"{HOME}/{path.name}/{STATE}") or step == max(found)
    }


def save(run: Path, state: TrainingState) -> None:
    """Write the checkpoint of `state` unless it exists; those before it are still there.

    Raises:
        DivergedError: when a weight is not finite.
        OSError: when it cannot be written.
    """
    if state.step in list_checkpoints(run):
        return
    for name, weight in state.model.named_parameters():
        if not weight.isfinite().all():
            raise DivergedError(f"{name} is not finite after step {state.step}")
    folder = Folder(run)
    folder.make(HOME)
    folder.clear_leftovers(HOME)
    with folder.write_folder(f"{HOME}/step-{state.step:08d}") as temporary:
        digests = {}
        # One after the other, so that memory does not hold both.
        for name, collect in zip(FILES, (_copy_weights, _flatten_moments), strict=True):
            data = safetensors.torch.save(collect(state))
            folder.write(f"{temporary}/{name}.safetensors", data)
            digests[name] = hashlib.sha256(data).hexdigest()
            del data
        content = {
            "format": FORMAT,
            **_list_progress(state),
            "first_loss": state.first_loss,
            "precision": state.precision,
            "threads": state.threads,
            "shared": state.shared,
            "sha256": digests,
        }
        folder.write_json(f"{temporary}/{STATE}", content, sealed=True)


def keep_only(run: Path, step: int) -> None:
    """Delete all checkpoints but that of a step, as far as the system allows."""
    others = [path for known, path in list_checkpoints(run).items() if known != step]
    if not others:
        return
    folder = Folder(run)
    with folder.own(HOME) as unread:  # while an analysis reads them, they stay until the next
        for path in others if unread else ():
            with contextlib.suppress(OSError):
                folder.remove(f"{HOME}/{path.name}")


def rewrite_counters(run: Path, state: TrainingState) -> None:
    """Write the counters and annealing of `state` into its checkpoint, which keeps its weights.

    Raises:
        OSError: when they cannot be written; the counters before are still there.
        RunError: when the checkpoint is incomplete.
    """
    folder, home = Folder(run), list_checkpoints(run)[state.step]
    name = f"{HOME}/{home.name}/{STATE}"
    content = folder.read_json(name, f"checkpoint {home} is incomplete; {AGAIN}")
    folder.write_json(name, content | _list_progress(state), sealed=True)


def restore(home: Path, state: TrainingState, batch_size: int) -> TrainingState:
    """Load a checkpoint into `state`, fresh from `lab.training.state.start`, and return it.

    Args:
        home: the checkpoint's folder.
        state: changed in place.
        batch_size: rows a step; for checkpoints from before lengthening, which do not count rows.

    Raises:
        RunError: when the checkpoint is truncated, tampered with, or of another model.
    """
    folder = Folder(home.parent.parent)
    content = folder.read_json(
        f"{HOME}/{home.name}/{STATE}", f"checkpoint {home} is incomplete; {AGAIN}"
    )
    if content.get("format") != FORMAT:
        raise RunError(
            f"checkpoint {home}: format {content.get('format')}, this lab reads {FORMAT}"
        )
    if content.get("step") != int(home.name.removeprefix("step-")):
        raise RunError(f"checkpoint {home}: state.json says step {content.get('step')}; {AGAIN}")
    if not isinstance(content.get("first_loss"), float | None):
        raise RunError(f"checkpoint {home}: state.json has no number as first_loss; {AGAIN}")
    if not isinstance(content.get("precision", ""), str):
        raise RunError(f"checkpoint {home}: state.json has no text as precision; {AGAIN}")
    unknown = {"rows": content["step"] * batch_size, "stage": 0, "stage_step": 0, "threads": 0}
    counters = unknown | content
    for name in (*COUNTERS, "threads"):
        if type(counters[name]) is not int or counters[name] < 0:
            raise RunError(f"checkpoint {home}: state.json has no count as {name}; {AGAIN}")
    if counters["stage_step"] > counters["step"] or counters["rows"] > MAX_ROWS:
        raise RunError(f"checkpoint {home}: the counts in state.json are impossible; {AGAIN}")
    validate(StateFile, content, f"checkpoint {home}, state.json; {AGAIN}")
    most = bound_file(state.model)
    weights, moments = (_read(home, name, content, most) for name in FILES)
    try:
        state.model.load_state_dict(weights)
        _load_moments(state, moments)
        for name in (*COUNTERS, "threads"):
            setattr(state, name, counters[name])
        state.first_loss, state.precision = content["first_loss"], content.get("precision", "")
        state.annealing, state.shared = _read_annealing(content), content.get("shared", False)
    except (RuntimeError, KeyError, ValueError) as error:
        raise RunError(
            f"checkpoint {home} does not fit its run: {shorten_message(error)}"
        ) from error
    return state


def _list_progress(state: TrainingState) -> dict[str, Any]:
    """Return what tells how far training is, and what its rate follows."""
    counters = {name: getattr(state, name) for name in COUNTERS}
    return counters | {"annealing": asdict(state.annealing)}


def _read_annealing(content: dict[str, Any]) -> Annealing:
    """Return what schedule "error" follows; older checkpoints have the last share alone."""
    wrong = content.get("wrong", 1.0)
    entry = content.get("annealing", {"wrong": wrong, "least": wrong})
    known = {f.name for f in fields(Annealing)}
    return Annealing(**{name: value for name, value in entry.items() if name in known})


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


def _read(home: Path, name: str, content: dict[str, Any], most: int) -> dict[str, Tensor]:
    file = home / f"{name}.safetensors"
    try:
        data = Folder(home.parent.parent).read(f"{HOME}/{home.name}/{file.name}", most)
    except OSError as error:
        raise RunError(f"checkpoint {file}: {error.strerror}; {AGAIN}") from error
    if hashlib.sha256(data).hexdigest() != content.get("sha256", {}).get(name):
        raise RunError(
            f"checkpoint {file}: digest differs from state.json's: truncated or changed since it "
            f"was written; {AGAIN}"
        )
    try:
        return safetensors.torch.load(data)
    except SafetensorError as error:  # with a digest that fits, as a stranger can make it
        raise RunError(f"checkpoint {file}: holds no tensors: {error}; {AGAIN}") from error

"""Checkpoints: one folder a step, renamed into place when complete; digests reveal changes."""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from lab.files import FORMAT, RunError, read_json, shorten_message, write, write_json
from lab.training.fit import DivergedError, TrainingState
from tasks.base import MAX_ROWS

FILES = ("model", "optimizer")
COUNTERS = ("step", "rows", "stage", "stage_step")
AGAIN = (
    "remove the checkpoint folder to begin again; history/ has earlier weights, which "
    "`lab analyze --step` reads"
)


def list_checkpoints(run: Path) -> dict[int, Path]:
    """Return the checkpoint folders of a run folder by step, oldest first."""
    numbered = (
        (path.name.removeprefix("step-"), path) for path in (run / "checkpoint").glob("step-*")
    )
    return dict(sorted((int(step), path) for step, path in numbered if step.isdecimal()))


def save(run: Path, state: TrainingState) -> None:
    """Write the checkpoint of `state` unless it exists, then delete the one before it.

    Raises:
        DivergedError: when a weight is not finite; the checkpoint before it is still there.
        OSError: when it cannot be written; the checkpoint before it is still there.
    """
    before = list_checkpoints(run)
    if state.step in before:
        return
    for name, weight in state.model.named_parameters():
        if not weight.isfinite().all():
            raise DivergedError(f"{name} is not finite after step {state.step}")
    home = run / "checkpoint" / f"step-{state.step:08d}"
    temporary = home.with_name(f".{home.name}.writing")
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        digests = {}
        for name, tensors in zip(
            FILES, (state.model.weights(), _flatten_moments(state)), strict=True
        ):
            data = safetensors.torch.save(tensors)
            write(temporary / f"{name}.safetensors", data)
            digests[name] = hashlib.sha256(data).hexdigest()
        content = {
            "format": FORMAT,
            **{name: getattr(state, name) for name in COUNTERS},
            "first_loss": state.first_loss,
            "precision": state.precision,
            "threads": state.threads,
            "wrong": state.wrong,
            "sha256": digests,
        }
        write_json(temporary / "state.json", content)
        os.replace(temporary, home)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for path in before.values():
        shutil.rmtree(path, ignore_errors=True)


def rewrite_counters(run: Path, state: TrainingState) -> None:
    """Write the counters of `state` into its checkpoint, which keeps its weights.

    Raises:
        OSError: when they cannot be written; the counters before are still there.
        RunError: when the checkpoint is incomplete.
    """
    file = list_checkpoints(run)[state.step] / "state.json"
    content = read_json(file, f"checkpoint {file.parent} is incomplete; {AGAIN}")
    write_json(file, content | {name: getattr(state, name) for name in COUNTERS})


def restore(home: Path, state: TrainingState, batch_size: int) -> TrainingState:
    """Load a checkpoint into `state`, fresh from `lab.training.fit.start`, and return it.

    Args:
        home: the checkpoint's folder.
        state: changed in place.
        batch_size: rows a step; for checkpoints from before lengthening, which do not count rows.

    Raises:
        RunError: when the checkpoint is truncated, tampered with, or of another model.
    """
    content = read_json(home / "state.json", f"checkpoint {home} is incomplete; {AGAIN}")
    if content.get("format") != FORMAT:
        raise RunError(
            f"checkpoint {home}: format {content.get('format')}, this lab reads {FORMAT}"
        )
    if content.get("step") != int(home.name.removeprefix("step-")):
        raise RunError(f"checkpoint {home}: state.json says step {content.get('step')}; {AGAIN}")
    if not isinstance(content.get("first_loss"), float | None):
        raise RunError(f"checkpoint {home}: state.json has no number as first_loss; {AGAIN}")
    wrong = content.get("wrong", 1.0)
    if not isinstance(wrong, float) or not 0 <= wrong <= 1:
        raise RunError(f"checkpoint {home}: state.json has no share as wrong; {AGAIN}")
    if not isinstance(content.get("precision", ""), str):
        raise RunError(f"checkpoint {home}: state.json has no text as precision; {AGAIN}")
    unknown = {"rows": content["step"] * batch_size, "stage": 0, "stage_step": 0, "threads": 0}
    counters = unknown | content
    for name in (*COUNTERS, "threads"):
        if type(counters[name]) is not int or counters[name] < 0:
            raise RunError(f"checkpoint {home}: state.json has no count as {name}; {AGAIN}")
    if counters["stage_step"] > counters["step"] or counters["rows"] > MAX_ROWS:
        raise RunError(f"checkpoint {home}: the counts in state.json are impossible; {AGAIN}")
    weights, moments = (_read(home, name, content) for name in FILES)
    try:
        state.model.load_state_dict(weights)
        _load_moments(state, moments)
        for name in (*COUNTERS, "threads"):
            setattr(state, name, counters[name])
        state.first_loss, state.precision = content["first_loss"], content.get("precision", "")
        state.wrong = wrong
    except (RuntimeError, KeyError, ValueError) as error:
        raise RunError(
            f"checkpoint {home} does not fit its run: {shorten_message(error)}"
        ) from error
    return state


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


def _read(home: Path, name: str, content: dict[str, Any]) -> dict[str, Tensor]:
    file = home / f"{name}.safetensors"
    try:
        data = file.read_bytes()
    except OSError as error:
        raise RunError(f"checkpoint {file}: {error.strerror}; {AGAIN}") from error
    if hashlib.sha256(data).hexdigest() != content.get("sha256", {}).get(name):
        raise RunError(
            f"checkpoint {file}: digest differs from state.json's: truncated or changed since it "
            f"was written; {AGAIN}"
        )
    return safetensors.torch.load(data)

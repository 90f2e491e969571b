"""Checkpoints: a folder a step, renamed into place when whole; digests tell a changed one."""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from lab.files import FORMAT, RunError, in_one_line, read_json, write, write_json
from lab.training.fit import DivergedError, State
from tasks.base import MAX_ROWS

FILES = ("model", "optimizer")
COUNTERS = ("step", "rows", "stage", "stage_step")
AGAIN = "remove the checkpoint folder to begin again"


def saved(run: Path) -> dict[int, Path]:
    """Return the checkpoint folders of a run folder by step, oldest first."""
    numbered = (
        (path.name.removeprefix("step-"), path) for path in (run / "checkpoint").glob("step-*")
    )
    return dict(sorted((int(step), path) for step, path in numbered if step.isdecimal()))


def save(run: Path, state: State) -> None:
    """Write the checkpoint of `state`, then drop the one before it; a no-op when it is there.

    Raises:
        DivergedError: when a weight is not finite; the checkpoint before it is still there.
        OSError: when it cannot be written; the checkpoint before it is still there.
    """
    before = saved(run)
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
        for name, tensors in zip(FILES, (state.model.weights(), _moments(state)), strict=True):
            data = safetensors.torch.save(tensors)
            write(temporary / f"{name}.safetensors", data)
            digests[name] = hashlib.sha256(data).hexdigest()
        told = {
            "format": FORMAT,
            **{name: getattr(state, name) for name in COUNTERS},
            "first_loss": state.first_loss,
            "precision": state.precision,
            "sha256": digests,
        }
        write_json(temporary / "state.json", told)
        os.replace(temporary, home)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for path in before.values():
        shutil.rmtree(path, ignore_errors=True)


def restore(home: Path, state: State, batch_size: int) -> State:
    """Bring `state`, fresh from `lab.training.fit.start`, to a checkpoint; returns it.

    Args:
        home: the checkpoint's folder.
        state: changed in place.
        batch_size: rows a step, from which a checkpoint older than lengthening counts its rows.

    Raises:
        RunError: when the checkpoint is truncated, tampered with, or of another model.
    """
    told = read_json(home / "state.json", f"checkpoint {home} is incomplete; {AGAIN}")
    if told.get("format") != FORMAT:
        raise RunError(f"checkpoint {home}: format {told.get('format')}, this lab reads {FORMAT}")
    if told.get("step") != int(home.name.removeprefix("step-")):
        raise RunError(f"checkpoint {home}: state.json says step {told.get('step')}; {AGAIN}")
    if not isinstance(told.get("first_loss"), float | None):
        raise RunError(f"checkpoint {home}: state.json has no number as first_loss; {AGAIN}")
    if not isinstance(told.get("precision", ""), str):
        raise RunError(f"checkpoint {home}: state.json has no text as precision; {AGAIN}")
    counters = {"rows": told["step"] * batch_size, "stage": 0, "stage_step": 0} | told
    for name in COUNTERS:
        if type(counters[name]) is not int or counters[name] < 0:
            raise RunError(f"checkpoint {home}: state.json has no count as {name}; {AGAIN}")
    if counters["stage_step"] > counters["step"] or counters["rows"] > MAX_ROWS:
        raise RunError(f"checkpoint {home}: the counts in state.json cannot be; {AGAIN}")
    weights, moments = (_read(home, name, told) for name in FILES)
    try:
        state.model.load_state_dict(weights)
        _load_moments(state, moments)
        for name in COUNTERS:
            setattr(state, name, counters[name])
        state.first_loss, state.precision = told["first_loss"], told.get("precision", "")
    except (RuntimeError, KeyError, ValueError) as error:
        raise RunError(f"checkpoint {home} does not fit its run: {in_one_line(error)}") from error
    return state


def _moments(state: State) -> dict[str, Tensor]:
    flat = {}
    for name, optimizer in state.optimizers.items():
        for index, moments in optimizer.state_dict()["state"].items():
            for key, value in moments.items():
                flat[f"{name}/{index}/{key}"] = torch.as_tensor(value).cpu().contiguous()
    return flat


def _load_moments(state: State, flat: dict[str, Tensor]) -> None:
    nested: dict[str, dict[int, dict[str, Tensor]]] = {name: {} for name in state.optimizers}
    for path, value in flat.items():
        name, index, key = path.split("/")
        nested[name].setdefault(int(index), {})[key] = value
    for name, optimizer in state.optimizers.items():
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": nested[name], "param_groups": groups})


def _read(home: Path, name: str, told: dict[str, Any]) -> dict[str, Tensor]:
    file = home / f"{name}.safetensors"
    try:
        data = file.read_bytes()
    except OSError as error:
        raise RunError(f"checkpoint {file}: {error.strerror}; {AGAIN}") from error
    if hashlib.sha256(data).hexdigest() != told.get("sha256", {}).get(name):
        raise RunError(
            f"checkpoint {file}: digest differs from state.json's: truncated or changed since it "
            f"was written; {AGAIN}"
        )
    return safetensors.torch.load(data)

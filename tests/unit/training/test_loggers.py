"""Loggers, offline: what they write is what metrics.jsonl has."""

import json
import struct
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import pytest
from typer.testing import CliRunner

from lab.cli.app import app
from lab.config import ModelConfig, Runtime, TrainConfig
from lab.training import loggers
from lab.training.experiment import carry_out
from lab.training.run import Run
from tasks import TASKS

SETTINGS = TrainConfig(batch_size=4, max_steps=4, eval_every=2, test_rows=8, precision="fp32")


def train(path: Path, logger: Literal["tensorboard", "wandb"]) -> Run:
    """Train for one step, stop, and resume, so that the log has two parts."""
    task = TASKS["mqar"](seq_len=8, vocab_size=16)
    run = Run(path, task, ModelConfig(stack="AM", d_model=8), SETTINGS)
    for minutes in (1e-9, None):
        carry_out(run, Runtime(device="cpu", max_minutes=minutes, log=logger))
    return run


def list_expected(run: Run) -> dict[str, list[tuple[int, Any]]]:
    """Return the numbers in metrics.jsonl by tag, with their steps."""
    found: dict[str, list[tuple[int, Any]]] = {}
    for row in run.read_metrics():
        for name, value in row.items():
            tag = "/".join(name.split("_", 1)) if name[:4] in ("vali", "test") else f"train/{name}"
            if name not in ("step", "test_interval"):
                found.setdefault(tag, []).append((row["step"], pytest.approx(value, rel=1e-6)))
    assert {"train/loss", "validation/accuracy", "test/accuracy"} <= found.keys()
    return found


def test_tensorboard_has_every_number(tmp_path):
    run = train(tmp_path / "run", "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    scalars = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    assert scalars == list_expected(run)


def test_wandb_offline_has_every_number(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = train(tmp_path / "run", "wandb")
    import_module("wandb").teardown(0)
    first, second = sorted(run.path.glob("wandb/offline-run-*/run-*.wandb"))
    assert first.name == second.name == f"run-{(run.path / 'wandb-id').read_text()}.wandb"
    assert read_history([first, second]) == list_expected(run)


def read_history(files: list[Path]) -> dict[str, list[tuple[int, float]]]:
    """Return the numbers in files of wandb by name, with their steps."""
    messages: Any = import_module("wandb.proto.wandb_internal_pb2")
    found: dict[str, list[tuple[int, float]]] = {}
    for file in files:
        for data in list_records(file.read_bytes()):
            record = messages.Record()
            record.ParseFromString(data)
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                if not name.startswith("_"):
                    place = found.setdefault(name, [])
                    place.append((record.history.step.num, json.loads(item.value_json)))
    return found


def list_records(data: bytes, header: int = 7, block: int = 2**15) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, after the header of wandb's files."""
    place, parts = header, b""
    while place + header <= len(data):
        if block - place % block < header:
            place += block - place % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + header : place + header + length]
        place += header + length
        if kind in (1, 4):  # a whole record, or its last part
            yield parts
            parts = b""


@pytest.mark.parametrize("logger", ["tensorboard", "wandb"])
def test_what_is_missing_says_how_to_install_it(tmp_path, monkeypatch, logger):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    words = f"mqar --seq-len 8 --vocab-size 16 --log {logger} --out {tmp_path / 'run'}"
    found = CliRunner().invoke(app, words.split())
    assert found.exit_code == 2
    assert f"log={logger}: the package {logger} is not installed" in found.stderr
    assert f"pip install 'wonderful-lab[{logger}]'" in found.stderr
    assert not (tmp_path / "run").exists()

"""Certifying the layers of a model before it is trained, since a leak can pass for learning."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lab.certify_settings import BEFORE_TRAINING, CertifySettings
from lab.files import RunError, explain_write_errors, read_json, shorten_message, write_json
from lab.hooks import HookPoint
from lab.laws.certification import Certification
from lab.models import LanguageModel
from lab.models.user_mixer import is_from_lab
from lab.training.records import CertificateFile, validate

FILE = "certificate.json"
LAWS = (
    "deterministic",
    "causal",
    "batch-invariant",
    "gradient reach",
    "gradient is the derivative",
)
"""The laws without which an accuracy says nothing about the layer."""
LONGEST = 2048
"""Longest row that is tried however long it takes."""
FIRST_ROWS = 128
"""Longest first rows of a run that every trial is made on."""


class UnlawfulError(RunError):
    """A layer breaks a law that training relies on; the message holds the counter-example."""


def certify_layers(
    model: LanguageModel, seq_lens: Sequence[int], device: torch.device, *, every: bool
) -> dict[str, Any]:
    """Test a model's layers against the laws that training relies on, and return the certificate.

    Layers of one class, with the same settings and shapes, are tested once.

    Args:
        model: whose layers they are.
        seq_lens: row lengths that it will be trained at, shortest first, tried beside short ones.
        device: where to try the layers.
        every: whether the lab's own layers are tested too, or only those of others.
    """
    began = time.process_time()
    short = BEFORE_TRAINING.lengths or ()
    settings = replace(
        BEFORE_TRAINING,
        lengths=tuple(sorted({*short, min(seq_lens[0], FIRST_ROWS)})),
        longer=(min(seq_lens[-1], LONGEST), *seq_lens[1:]),
        d_model=model.cfg.d_model,
        layout="btd",  # which a block gives them
        device=str(device),
    )
    layers: dict[str, dict[str, Any]] = {}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for number, layer in _list_layers(model, every):
            key = _describe(layer)
            if key in layers:
                layers[key]["blocks"].append(number)
            else:
                layers[key] = {"layer": type(layer).__name__, "blocks": [number]}
                layers[key] |= _judge(layer, settings)
    found = {"layers": list(layers.values())}
    return {**found, "cpu_seconds": round(time.process_time() - began, 2)}


def _judge(layer: nn.Module, settings: CertifySettings) -> dict[str, Any]:
    try:
        certification = Certification(layer, settings)
    except ValueError as error:
        return {"note": shorten_message(error), "laws": []}
    kept = ("law", "verdict", "evidence", "counterexample", "tokens", "note")
    verdicts = [asdict(certification.judge(law)) for law in LAWS]
    return {"laws": [{name: verdict[name] for name in kept} for verdict in verdicts]}


def _list_layers(model: LanguageModel, every: bool) -> Iterator[tuple[int, nn.Module]]:
    """Yield the mixers and state transforms of a model, each with the number of its block."""
    for number, block in enumerate(model.list_blocks()):
        for layer in (block.mixer, block.mlp):
            if layer is not None and (every or not is_from_lab(layer)):
                yield number, layer


def _describe(layer: nn.Module) -> str:
    """Return the classes, attributes and shapes of a layer and its parts; equal layers agree."""
    parts = [
        (name, type(part), {k: v for k, v in vars(part).items() if not k.startswith("_")})
        for name, part in layer.named_modules()
        if not isinstance(part, HookPoint)
    ]
    return repr((parts, [(name, p.shape) for name, p in layer.state_dict().items()]))


def write_certificate(run: Path, certificate: dict[str, Any]) -> None:
    """Write certificate.json into a run folder.

    Raises:
        RunError: when it cannot be written.
        UnlawfulError: when a law fails.
    """
    with explain_write_errors(run):
        write_json(run / FILE, certificate)
    if any(_list_failing(layer) for layer in certificate["layers"]):
        raise UnlawfulError(
            f"{describe_certificate(certificate)}. --no-certify trains it nevertheless"
        )


def read_certificate(run: Path) -> dict[str, Any] | None:
    """Return what certifying a run's layers found; None if they were not certified.

    Raises:
        RunError: when the file cannot be read, or is no certificate.
    """
    file = run / FILE
    if not os.path.lexists(file):
        return None
    where = f"{file}: cannot be read; remove it"
    validate(CertificateFile, content := read_json(file, where), where)
    return content


def describe_certificate(certificate: dict[str, Any]) -> str:
    """Say in one line what the laws found."""
    return "; ".join(map(_describe_layer, certificate["layers"])) or "no layer was certified"


def _describe_layer(layer: dict[str, Any]) -> str:
    failing = _list_failing(layer)
    if failing:
        law = failing[0]
        more = f", and {len(failing) - 1} more" if failing[1:] else ""
        return f"{layer['layer']} breaks the law “{law['law']}”{more}: {law['counterexample']}"
    holding = [law for law in layer["laws"] if law["verdict"] == "holds"]
    left = [law["law"] for law in layer["laws"] if law["verdict"] == "not decided"]
    why = f" ({layer['note']})" if layer.get("note") else ""
    if not holding:
        return f"{layer['layer']}: no law was decided{why}"
    # Up to how many tokens it was tried matters most for causality.
    laws = [
        f"causal (up to {law['tokens']:,} tokens)" if law["law"] == "causal" else law["law"]
        for law in holding
    ]
    words = [f"{layer['layer']} obeys {', '.join(laws)}"]
    words += [f"not decided: {', '.join(left)}"] if left else []
    words += [f"note: {law['note']}" for law in holding if law.get("note")]
    return "; ".join(words)


def _list_failing(layer: dict[str, Any]) -> list[dict[str, Any]]:
    return [law for law in layer["laws"] if law["verdict"] == "fails"]

"""Certifying a run's layers before it trains, since a leak can pass for learning."""

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from lab.certify_settings import BEFORE_TRAINING
from lab.files import shorten_message
from lab.hooks import HookPoint
from lab.laws.certification import Certification
from lab.lengthening import list_stages
from lab.models.user_mixer import is_from_lab
from lab.training.runs import Run

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


def certify_layers(run: Run, device: torch.device, every: bool) -> dict[str, Any]:
    """Test a run's layers against the laws that training relies on, and return the certificate.

    Layers of one class, with the same settings and shapes, are tested once.

    Args:
        run: its row lengths are tried beside short ones.
        device: where to try the layers.
        every: whether the lab's own layers are tested too, or only those of others.
    """
    began = time.process_time()
    lens = [stage.task.seq_len for stage in list_stages(run.task, run.train)]
    short = BEFORE_TRAINING.lengths or ()
    settings = replace(
        BEFORE_TRAINING,
        lengths=tuple(sorted({*short, min(lens[0], FIRST_ROWS)})),
        longer=(min(lens[-1], LONGEST), *lens[1:]),
        d_model=run.model.d_model,
        device=str(device),
    )
    layers: dict[str, dict[str, Any]] = {}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for number, layer in _list_layers(run.build(), every):
            key = _describe(layer)
            if key in layers:
                layers[key]["blocks"].append(number)
            else:
                layers[key] = {"layer": type(layer).__name__, "blocks": [number]}
                layers[key] |= _judge(layer, settings)
    found = {"layers": list(layers.values())}
    return {**found, "cpu_seconds": round(time.process_time() - began, 2)}


def _judge(layer: nn.Module, settings: Any) -> dict[str, Any]:
    try:
        certification = Certification(layer, settings)
    except ValueError as error:
        return {"note": shorten_message(error), "laws": []}
    kept = ("law", "verdict", "evidence", "counterexample", "tokens", "note")
    verdicts = [asdict(certification.judge(law)) for law in LAWS]
    return {"laws": [{name: verdict[name] for name in kept} for verdict in verdicts]}


def _list_layers(model: nn.Module, every: bool) -> Iterator[tuple[int, nn.Module]]:
    """Yield the mixers and state transforms of a model, each with the number of its block."""
    blocks: Any = model.get_submodule("blocks")
    for number, block in enumerate(blocks):
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

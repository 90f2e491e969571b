"""Which keys do the dynamic masks keep, do they remove noise or answers, and do they learn?"""

import math

import numpy as np

from analysis.base import Finding, NotApplicableError, Subject, describe, draw
from analysis.dynamic_mask.biases import measure_biases
from analysis.dynamic_mask.effect import measure_effect
from analysis.dynamic_mask.history import measure_history
from analysis.dynamic_mask.kept_by_position import KeptByPosition, split_bands
from analysis.dynamic_mask.masks import (
    find_masked_layers,
    measure_heads,
    record_masked_layers,
)
from analysis.dynamic_mask.selection import KeySelection
from analysis.dynamic_mask.trajectory import extract_trajectories

__all__ = ["TITLE", "describe", "draw", "measure"]

TITLE = "What the dynamic masks do"


def measure(subject: Subject) -> list[Finding]:
    """Return the biases, which keys the masks keep, and what that does to the answers.

    If some keys are masked, where those are; if the run kept its weights, also how the masks
    changed over training.

    Raises:
        NotApplicableError: if no block has a dynamic mask.
    """
    if not find_masked_layers(subject.model):
        raise NotApplicableError("no block has a dynamic mask")
    layers = record_masked_layers(subject.model, subject.batch)
    rng = np.random.default_rng(subject.seed)
    names = subject.task.role_names
    heads = tuple(
        head for layer in layers for head in measure_heads(layer, subject.batch, len(names), rng)
    )
    findings: list[Finding] = [measure_biases(subject, layers, heads), KeySelection(heads, names)]
    if min(head.kept for head in heads) < 1:
        findings.append(KeptByPosition(names, split_bands(subject.batch.inputs.shape[1]), heads))
    findings.append(measure_effect(subject, heads, rng))
    if subject.run is None or len(subject.run.list_steps()) < 2:
        return findings
    history = measure_history(subject.run, subject.batch)
    findings += extract_trajectories(history)
    if not all(math.isnan(size) for size in history.gradients[0]):
        findings.append(history)
    return findings

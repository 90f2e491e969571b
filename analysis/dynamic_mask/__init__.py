"""Which keys do the dynamic masks keep, do they remove noise or answers, and do they learn?"""

import numpy as np

from analysis.base import Finding, NotApplicableError, Subject
from analysis.dynamic_mask.effect import KeptByPosition, KeySelection, measure_effect, split_bands
from analysis.dynamic_mask.learning import measure_biases, measure_history
from analysis.dynamic_mask.masks import find_masked_layers, measure_heads, record_masked_layers

__all__ = ["TITLE", "measure"]

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
    batch, names = subject.batch, subject.task.role_names
    layers = record_masked_layers(subject.model, batch)
    rng = np.random.default_rng(subject.seed)
    heads = tuple(head for layer in layers for head in measure_heads(layer, batch, len(names), rng))
    findings: list[Finding] = [measure_biases(subject, layers, heads), KeySelection(heads, names)]
    if min(head.kept for head in heads) < 1:
        findings.append(KeptByPosition(names, split_bands(batch.inputs.shape[1]), heads))
    findings.append(measure_effect(subject, heads, rng))
    if subject.run is not None and len(subject.run.list_steps()) > 1:
        findings += measure_history(subject.run, batch)
    return findings

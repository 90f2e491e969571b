"""Which values does inner function attention use, what for, and does it matter which?"""

import numpy as np

from analysis.base import Finding, NotApplicableError, Subject
from analysis.value_usage.choices import (
    ValueUses,
    find_value_layers,
    measure_histories,
    measure_usage,
    record_choices,
)
from analysis.value_usage.swaps import measure_swaps

__all__ = ["TITLE", "measure"]

TITLE = "Which values inner function attention uses"


def measure(subject: Subject) -> list[Finding]:
    """Return the use of values, a history per layer if the run kept its weights, and swaps.

    Raises:
        NotApplicableError: if no block looks values up.
    """
    layers = find_value_layers(subject.model)
    if not layers:
        raise NotApplicableError("no block looks its values up: none is inner function attention")
    rng = np.random.default_rng(subject.seed)
    roles, names = subject.batch.roles.cpu().numpy(), subject.task.role_names
    choices = record_choices(subject.model, subject.batch)
    uses = tuple(
        measure_usage(i, layer, choices[i], roles, len(names), rng) for i, layer in layers.items()
    )
    findings: list[Finding] = [ValueUses(uses, names)]
    if subject.run is not None and len(subject.run.list_steps()) > 1:
        findings += measure_histories(subject.run, subject.batch, rng)
    return [*findings, measure_swaps(subject, {layer.layer: layer.shares for layer in uses})]

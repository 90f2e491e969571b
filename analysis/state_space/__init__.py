"""What does each SSD layer keep, and for how long? Now and at step 0.

    half-life           ln 2 / mean(−a)
    effective context   the smallest window of latest tokens that holds 90 % of Σ_j |M̃_ij|
    content and decay   log|M_ij| = log|C_i·B_j| + log L_ij: which of them varies?

M̃ is signed, without D, and never passes through a softmax.
"""

from dataclasses import replace

import torch

from analysis.base import Finding, Subject, describe, draw
from analysis.state_space.magnitudes import measure_magnitudes
from analysis.state_space.memory import StateMemory, measure_memory
from analysis.state_space.recurrence import choose_rows, collect_recurrences, load_initial_model
from analysis.state_space.role_means import measure_roles
from analysis.statistics.estimates import thin
from tasks.base import Batch

__all__ = ["TITLE", "describe", "draw", "measure"]

TITLE = "What the states keep"
PICTURED = 4
"""Maximum number of layers whose magnitudes are drawn; of more, evenly spaced ones."""


@torch.no_grad()
def measure(subject: Subject) -> list[Finding]:
    """Return memory, contexts, means by role, and the magnitudes of a few layers.

    Raises:
        NotApplicableError: for a model without SSD.
    """
    batch = choose_rows(subject)
    memory, *others = _measure_now(subject, batch)
    initial = load_initial_model(subject)
    if initial is not None:
        memory = replace(memory, initial=measure_memory(collect_recurrences(initial, batch))[0])
    return [memory, *others]


def _measure_now(subject: Subject, batch: Batch) -> tuple[StateMemory, *tuple[Finding, ...]]:
    """Measure the subject's weights; their states are freed before there are the initial ones."""
    found = collect_recurrences(subject.model, batch)
    return (
        *measure_memory(found),
        measure_roles(found, batch, subject.task.role_names),
        *(measure_magnitudes(layer, subject) for layer in thin(found, PICTURED)),
    )

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
from analysis.state_space.memory import measure_memory
from analysis.state_space.recurrence import collect_recurrences
from analysis.state_space.role_means import measure_roles
from analysis.statistics.estimates import thin

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
    found, initial, batch = collect_recurrences(subject)
    memory, contexts = measure_memory(found)
    return [
        replace(memory, initial=measure_memory(initial)[0]) if initial else memory,
        contexts,
        measure_roles(found, batch, subject.task.role_names),
        *(measure_magnitudes(layer, subject) for layer in thin(found, PICTURED)),
    ]

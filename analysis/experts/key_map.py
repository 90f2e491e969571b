"""Which experts are chosen, and together with which? The load on the grid of product keys."""

import math

import numpy as np

from analysis.base import Subject, describe, draw
from analysis.experts.co_activation import CoActivation, measure_co_activation
from analysis.experts.load_map import LoadMap, map_load
from analysis.experts.pairs import collect_choices

__all__ = ["TITLE", "describe", "draw", "measure"]

TITLE = "Map of experts"
INITIAL = 2**13
"""About how many tokens the choices before training are measured on."""


def measure(subject: Subject) -> list[LoadMap | CoActivation]:
    """Map the load of each layer with product-key experts, then measure their co-activation.

    Raises:
        NotApplicableError: for a model without such a layer.
    """
    found = collect_choices(subject.model, subject.batch)
    initial = None
    if subject.run is not None:
        batch = subject.batch[: math.ceil(INITIAL / subject.task.seq_len)]
        initial = collect_choices(subject.run.build().eval().to(batch.inputs.device), batch)
    rng = np.random.default_rng(subject.seed)
    maps = [map_load(layer, rng) for layer in found]
    return [*maps, measure_co_activation(found, rng, initial)]

"""What is found of SSD's states: how long heads remember, what they do, what their matrix holds."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from analysis.plots import heatmaps as pictures
from analysis.record import figure_only

QUANTITIES = ("dt", "e^a", "write", "read")
"""Per token: the step; what is kept of the state; ‖dt·B⊗x‖, what is added to it; ‖h C‖, what is
read from it."""


@dataclass(frozen=True)
class Memory:
    """How long each head remembers; the same of the initial weights under `initial`.

    Attributes:
        layers: index of the block, a head an entry.
        heads: the head's index in its layer.
        half_life: ln 2 / mean(−a), tokens; ∞ without decay.
        context: effective context, tokens in [1, i + 1]: mean over positions and rows.
        content, decay, covariance: shares of var log|M_ij| over j < i: var log|C_i·B_j|,
            var log L_ij and twice their covariance; they add up to 1.
        uniform_context: of a uniform causal matrix.
        rows: of the batch.
        initial: of the run's initial weights; None without a run, or of those themselves.
    """

    layers: Int[np.ndarray, " h"]
    heads: Int[np.ndarray, " h"]
    half_life: Float[np.ndarray, " h"]
    context: Float[np.ndarray, " h"]
    content: Float[np.ndarray, " h"]
    decay: Float[np.ndarray, " h"]
    covariance: Float[np.ndarray, " h"]
    uniform_context: float
    rows: int
    initial: "Memory | None"


@dataclass(frozen=True)
class Contexts:
    """How wide each head's effective context is by position.

    Attributes:
        layers, heads, rows: as in `Memory`.
        positions: about powers of √2 less one, and the last, i.
        context_at: effective context there, tokens in [1, i + 1]: mean over rows.
        uniform_at: of a uniform causal matrix.
    """

    layers: Int[np.ndarray, " h"]
    heads: Int[np.ndarray, " h"]
    positions: Int[np.ndarray, " i"]
    context_at: Float[np.ndarray, "h i"]
    uniform_at: Float[np.ndarray, " i"]
    rows: int


@dataclass(frozen=True)
class Roles:
    """What each head does at each kind of token: means over tokens of the role; `QUANTITIES`.

    Attributes:
        layers, heads, rows: as in `Memory`.
        role_names: the roles that there are on these rows.
        quantities: names.
        means: NaN nowhere.
    """

    layers: Int[np.ndarray, " h"]
    heads: Int[np.ndarray, " h"]
    role_names: tuple[str, ...]
    quantities: tuple[str, ...]
    means: Float[np.ndarray, "q r h"]
    rows: int


@dataclass(frozen=True)
class Magnitudes:
    """log₁₀|M̃| of a layer on the first row.

    Attributes:
        layer: index of the block.
        largest: log₁₀ of the largest magnitude.
        floor: log₁₀ of what smaller ones are shown as.
        median: log₁₀ of the median magnitude of the cells drawn.
        below: share of those below the floor, in [0, 1].
        shown: the picture.
    """

    layer: int
    largest: float
    floor: float
    median: float
    below: float
    shown: pictures.Heatmap = figure_only()

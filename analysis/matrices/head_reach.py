"""How widely and how far each head looks."""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from analysis.base import Finding, Words
from analysis.plots.heads import LINES, Panel, draw_dots, name_heads
from analysis.words import read_alike


@dataclass(frozen=True)
class HeadReach(Finding):
    """How widely and how far each head looks.

    Attributes:
        layers, heads, mixers, rows: as in `HeadScores`.
        entropy: H of a row of |M| normalised, nats in [0, ln(i + 1)]; mean over the matrix's rows
            and the batch's.
        effective_keys: e^H in [1, i + 1]; likewise.
        distance: Σ|M|(i − j) / Σ|M|, tokens.
        uniform_entropy, uniform_keys, uniform_distance: of a uniform causal matrix.
    """

    layers: Int[np.ndarray, " h"]
    heads: Int[np.ndarray, " h"]
    mixers: tuple[str, ...]
    entropy: Float[np.ndarray, " h"]
    effective_keys: Float[np.ndarray, " h"]
    distance: Float[np.ndarray, " h"]
    uniform_entropy: float
    uniform_keys: float
    uniform_distance: float
    rows: int

    def describe(self) -> Words:
        """Name the sharpest, widest, nearest and farthest heads."""
        count, says = len(self.layers), self._summarize()
        reading = (
            "Effective keys are e^H, H the entropy of a row of |M| normalised, mean over rows: 1 "
            "for a row of one entry. Distance is Σ|M|(i − j) / Σ|M|. The dashed line is a uniform "
            "matrix."
        )
        if "SSD" in self.mixers:
            reading += " An SSD matrix has D, the skip, on its diagonal, which sharpens it."
        if count > LINES:
            reading += " Heads of a layer share a line."
        alt = f"Dot plot of effective keys and mean distance of {count} heads. {says}"
        return Words("Spread and distance of |M|", says, reading, alt)

    def _summarize(self) -> str:
        keys, distance = self.effective_keys, self.distance
        if len(keys) == 1 and np.isfinite(keys[0]):
            says = f"The head spreads over {keys[0]:.3g} keys (uniform rows"
            says += f" {self.uniform_keys:.3g}), {distance[0]:.3g} tokens back on average"
            return f"{says} (uniform {self.uniform_distance:.3g})."
        seen = np.flatnonzero(np.isfinite(keys))
        if not len(seen):
            return "No head has any mass."
        idle = len(keys) - len(seen)
        without = f"; {idle} {'head has' if idle == 1 else 'heads have'} no mass" if idle else ""
        names = [name_heads(self.layers, self.heads)[i] for i in seen]
        keys, distance = keys[seen], distance[seen]
        sharp, wide = int(keys.argmin()), int(keys.argmax())
        near, far = int(distance.argmin()), int(distance.argmax())
        spread = f"Head {names[sharp]} is the sharpest with {keys[sharp]:.3g} effective keys, "
        spread += f"{names[wide]} the widest with {keys[wide]:.3g}"
        if read_alike(keys[sharp], keys[wide]):
            every = "Every head" if not idle else f"Each of {len(seen)} heads"
            every = f"Head {names[0]}" if len(seen) == 1 else every
            spread = f"{every} spreads over {keys[sharp]:.3g} effective keys"
        reach = f"mean distances go from {distance[near]:.3g} ({names[near]}) to "
        reach += f"{distance[far]:.3g} tokens ({names[far]}; "
        if read_alike(distance[near], distance[far]):
            reach = f"the mean distance of each is {distance[near]:.3g} tokens ("
        return (
            f"{spread} (uniform rows {self.uniform_keys:.3g}); {reach}uniform "
            f"{self.uniform_distance:.3g}){without}."
        )

    def draw(self) -> go.Figure:
        """Draw one line per head, one panel per quantity."""
        panels = [
            Panel(title, (values,), (-0.05 * most, 1.05 * most), chance=uniform)
            for title, values, uniform in (
                ("effective keys", self.effective_keys, self.uniform_keys),
                ("mean distance", self.distance, self.uniform_distance),
            )
            for most in (float(np.nanmax(values, initial=uniform)),)
        ]
        return draw_dots(self.layers, self.heads, panels, ("heads",), "uniform", "tokens")

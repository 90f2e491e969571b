"""What each SSD head does at each kind of token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.base import Finding, Words
from analysis.plots.heads import LINES, Panel, bound_log_axis, draw_dots, name_heads
from analysis.state_space.recurrence import Recurrence, index_heads, join_heads
from tasks.base import Batch

QUANTITIES = ("dt", "e^a", "write", "read")
"""Per token: the step; the share of the state that is kept; ‖dt·B⊗x‖, what is added to the state;
‖h C‖, what is read from it."""
FAVOURS = 1.5
"""A head distinguishes roles if one role's mean is at least this many times another's."""


@dataclass(frozen=True)
class RoleMeans(Finding):
    """What each head does at each kind of token: means over the tokens of a role.

    Attributes:
        layers, heads, rows: as in `analysis.state_space.memory.StateMemory`.
        role_names: the roles that occur on these rows.
        quantities: names, `QUANTITIES`.
        means: by quantity, role and head; never NaN.
    """

    layers: Int[np.ndarray, " h"]
    heads: Int[np.ndarray, " h"]
    role_names: tuple[str, ...]
    quantities: tuple[str, ...]
    means: Float[np.ndarray, "q r h"]
    rows: int

    def describe(self) -> Words:
        """Say whether heads write more at one role's tokens than at another's."""
        says = self._summarize()
        reading = (
            "Means over the tokens of each role, on logarithmic axes: dt, the step; 1 − e^a, the "
            "share of the state that is forgotten at that token; ‖dt·B⊗x‖, what is written to the "
            "state; ‖h C‖, what is read from it, before D and gate. "
            f"{self.rows} rows of the batch."
        )
        if len(self.layers) > LINES:
            reading += " Heads of a layer share a line."
        alt = f"Dot plots of step, decay, write and read by role. {says}"
        return Words("What the SSD heads do at each kind of token", says, reading, alt)

    def _summarize(self) -> str:
        if len(self.role_names) < 2:
            return f"All tokens have the same role, {', '.join(self.role_names)}."
        write = self.means[self.quantities.index("write")]
        lowest = np.maximum(write.min(0), np.sqrt(np.finfo(float).tiny))
        # A head that writes nothing at any token favours no role.
        ratio = np.maximum(write.max(0), lowest) / lowest
        head = int(ratio.argmax())
        most, least = (self.role_names[int(i(write[:, head]))] for i in (np.argmax, np.argmin))
        name = name_heads(self.layers, self.heads)[head]
        if ratio[head] == 1:
            return "No head distinguishes roles: each writes as much at the tokens of every role."
        more = f"{ratio[head]:.3g} times as much at {most} tokens as at {least} ones"
        if not write[:, head].min():
            more = f"something at {most} tokens and nothing at {least} ones"
        if ratio[head] < FAVOURS:
            return (
                f"No head distinguishes roles by what it writes: at most, head {name} has {more}."
            )
        says = f"Head {name} writes {more}"
        others = int((ratio >= FAVOURS).sum()) - 1
        if others:
            does, heads = ("does", "head") if others == 1 else ("do", "heads")
            says += f"; so {does} {others} other {heads}, by {FAVOURS:g} times or more"
        return f"{says}."

    def draw(self) -> go.Figure:
        """Draw the four quantities by role as dots, one line per head."""
        titles = ("step\ndt", "forgotten\n1 − e^a", "written\n‖dt·B⊗x‖", "read\n‖h C‖")
        dt, kept, write, read = self.means
        panels = [
            # e^a is next to 1 in heads that remember; only 1 − e^a shows how they differ.
            Panel(title, tuple(np.where(means > 0, means, np.nan)), bound_log_axis(means), log=True)
            for title, means in zip(titles, (dt, 1 - kept, write, read), strict=True)
            if (means > 0).any()
        ]
        return draw_dots(self.layers, self.heads, panels, self.role_names, "")


def measure_roles(
    found: Sequence[Recurrence], batch: Batch, role_names: tuple[str, ...]
) -> RoleMeans:
    """Average step, decay, write and read over the tokens of each role."""
    present = [role for role in range(len(role_names)) if (batch.roles == role).any()]
    masks = [batch.roles == role for role in present]

    def average(measure: Callable[[Recurrence], Tensor]) -> np.ndarray:
        """Return a quantity [b t h] by role, [r h]."""
        return join_heads(
            found,
            lambda layer: torch.stack([measure(layer)[mask].mean(0) for mask in masks], dim=1),
        ).T

    means = (
        average(lambda layer: layer.dt),
        average(lambda layer: layer.log_decay.exp()),
        average(lambda layer: layer.writes),
        average(lambda layer: layer.reads.norm(dim=-1)),
    )
    names = tuple(role_names[role] for role in present)
    return RoleMeans(*index_heads(found), names, QUANTITIES, np.stack(means), len(batch.inputs))

"""How long each SSD head remembers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.base import Finding, Words
from analysis.plots.heads import LINES, Panel, bound_log_axis, draw_dots, name_heads
from analysis.state_space.contexts import Contexts
from analysis.state_space.recurrence import HELD, Recurrence, index_heads, join_heads
from analysis.words import read_alike


@dataclass(frozen=True)
class StateMemory(Finding):
    """How long each head remembers; the same of the initial weights under `initial`.

    Attributes:
        layers: index of the block, one entry per head.
        heads: the head's index in its layer.
        half_life: ln 2 / mean(−a), tokens; ∞ without decay.
        context: effective context, tokens in [1, i + 1]: mean over positions and rows.
        content, decay, covariance: shares of var log|M_ij| over j < i: var log|C_i·B_j|,
            var log L_ij and twice their covariance; they add up to 1.
        uniform_context: of a uniform causal matrix.
        rows: of the batch.
        initial: of the run's initial weights; None without a run, or if these are the subject's.
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
    initial: "StateMemory | None"

    def describe(self) -> Words:
        """Say how far half-lives and contexts reach."""
        count = len(self.heads)
        says = f"{self._describe_half_lives()}; {self._describe_context()}"
        reading = (
            "Half-life is ln 2 / mean(−a). The effective context of a position is the smallest "
            f"window of latest tokens that holds {100 * HELD:.0f} % of Σ_j |M̃_ij|, without D; the "
            f"panel shows its mean over positions and {self.rows} rows. The last panel is the "
            "share of decay, var log L, in the variance of log|M| between positions; the rest "
            "belongs to content, log|C·B|, and to their covariance."
        )
        if self.initial is not None:
            reading += " Diamonds are the run's weights at step 0."
        if 0 < np.isinf(self.half_life).sum() < count:
            reading += " Heads without decay have no dot for a half-life."
        if count > LINES:
            reading += " Heads of a layer share a line."
        alt = f"Dot plot of half-life, effective context and decay's share, {count} heads. {says}"
        return Words("Memory of the SSD heads", says, reading, alt)

    def _describe_half_lives(self) -> str:
        """Say between which half-lives the heads lie, and how many have none."""
        names, finite = name_heads(self.layers, self.heads), np.flatnonzero(self.half_life < np.inf)
        if not len(finite):
            return "No head forgets: there is no decay"
        low, high = (int(finite[at(self.half_life[finite])]) for at in (np.argmin, np.argmax))
        if len(names) == 1:
            return f"The half-life is {self._format_half_life(low)}"
        if len(finite) == 1:
            says = f"The half-life of head {names[low]} is {self._format_half_life(low)}"
        elif self._format_half_life(low) == self._format_half_life(high):
            all_heads = "all heads" if len(finite) == len(names) else f"{len(finite)} heads"
            says = f"The half-life of {all_heads} is {self._format_half_life(low)}"
        else:
            says = f"Half-lives go from {self._format_half_life(low, names[low])} to "
            says += self._format_half_life(high, names[high])
        endless = len(names) - len(finite)
        if not endless:
            return says
        if endless > 1:
            return f"{says}; {endless} heads never forget"
        return f"{says}; {'the other head' if len(names) == 2 else '1 head'} never forgets"

    def _format_half_life(self, head: int, name: str = "") -> str:
        """Return a half-life as text, with the head's name and the half-life at step 0."""
        notes = [f"head {name}"] if name else []
        if self.initial is not None:
            before = self.initial.half_life[head]
            notes.append(f"{'endless' if np.isinf(before) else f'{before:.3g}'} at step 0")
        text = f"{self.half_life[head]:.3g} tokens"
        return f"{text} ({'; '.join(notes)})" if notes else text

    def _describe_context(self) -> str:
        """Name the head with the widest context, next to a uniform matrix."""
        widest, one = int(self.context.argmax()), len(self.heads) == 1
        alike = not one and read_alike(self.context.min(), self.context.max())
        whose = "its" if one else "every head's" if alike else "the widest"
        name = "" if one or alike else f" (head {name_heads(self.layers, self.heads)[widest]})"
        return (
            f"{whose} effective context is {self.context[widest]:.3g} tokens{name}, compared with "
            f"{self.uniform_context:.3g} for a uniform matrix."
        )

    def draw(self) -> go.Figure:
        """Draw half-life, effective context and decay's share as dots, one line per head."""
        sources = [self] if self.initial is None else [self, self.initial]
        panels = []
        half_lives = tuple(
            np.where(np.isinf(source.half_life), np.nan, source.half_life) for source in sources
        )
        if not np.isnan(half_lives).all():
            ends = bound_log_axis(*half_lives)
            panels.append(Panel("half-life,\ntokens", half_lives, ends, log=True))
        contexts, uniform = tuple(source.context for source in sources), self.uniform_context
        ends = bound_log_axis(*contexts, np.array([uniform]))
        panels.append(Panel("context,\ntokens", contexts, ends, chance=uniform, log=True))
        shares = tuple(100 * source.decay for source in sources)
        ends = (-5.0, 1.05 * max(100.0, float(np.nanmax(shares))))
        panels.append(Panel("var log|M|\nby decay, %", shares, ends))
        series = ("now", "step 0")[: len(sources)]
        return draw_dots(self.layers, self.heads, panels, series, "uniform")


def measure_memory(found: Sequence[Recurrence]) -> tuple[StateMemory, Contexts]:
    """Measure how long heads remember, and their effective context by position."""
    n_rows, seq_len = found[0].dt.shape[:2]
    layers, heads = index_heads(found)

    def average(measure: Callable[[Recurrence, int], Tensor]) -> np.ndarray:
        """Return the mean over rows of the batch that have a number."""
        return join_heads(
            found,
            lambda layer: (
                torch.stack([measure(layer, row) for row in range(n_rows)]).double().nanmean(0)
            ),
        )

    context = average(Recurrence.measure_contexts)
    shares = average(Recurrence.split_variance)
    powers = np.round(2 ** (np.arange(2 * seq_len.bit_length()) / 2)).astype(int) - 1
    positions = np.unique([*powers[powers < seq_len], seq_len - 1])
    uniform = np.ceil(HELD * np.arange(1, seq_len + 1) - 1e-6)
    memory = StateMemory(
        layers=layers,
        heads=heads,
        half_life=join_heads(found, lambda layer: layer.half_lives),
        context=context.mean(-1),
        content=shares[:, 0],
        decay=shares[:, 1],
        covariance=shares[:, 2],
        uniform_context=float(uniform.mean()),
        rows=n_rows,
        initial=None,
    )
    at = Contexts(layers, heads, positions, context[:, positions], uniform[positions], n_rows)
    return memory, at

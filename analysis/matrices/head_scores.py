"""How much of each head's mass lies where a kind of head would look."""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from analysis.base import Finding, Words
from analysis.links import IN_PLACE, Offsets
from analysis.matrices.layer_matrix import SHOWS
from analysis.matrices.moves import GATED_TARGETS
from analysis.plots.heads import LINES, Panel, draw_dots
from analysis.words import capitalize, name_place, percent

NAMED = 3
"""Maximum number of heads that a sentence names."""
PLACES = {
    "previous token": "the token before",
    "duplicate token": "earlier positions of the same token, where there are any",
    "induction": "the token that followed an earlier copy of this one, in rows that have one",
    "first token": "the first token",
}
"""Where a head of each kind looks."""


@dataclass(frozen=True)
class HeadScores(Finding):
    """How much of each head's mass lies where a kind of head would look; p of `PATTERNS`.

    Attributes:
        layers: index of the block, one entry per head.
        heads: the head's index in its layer.
        mixers: the mixer's class.
        patterns: the kinds, in the order of the columns.
        scores: ⟨|M|, P⟩ / Σ|M| in [0, 1]: mean over rows of the batch.
        score_chance: the same of a uniform causal matrix.
        shares: ⟨|M|, P⟩ / Σ|M| over those rows of M in which P has a position; 1 for a pure head
            of that kind. NaN where no token of the batch has such a position.
        chance: the same of a uniform causal matrix.
        half_widths: of the shares' 95 % intervals, over rows of the batch.
        moved_shares: the shares when an entry weighs ‖M_ij v_j W_O‖; NaN for a mixer whose project
            is not linear.
        sampled: whether `moved_shares` of a gated layer come from only `GATED_TARGETS` rows of M.
        rows: of the batch.
        offsets: how far after its positions the pattern of induction lies, by layer.
    """

    layers: Int[np.ndarray, " h"]
    heads: Int[np.ndarray, " h"]
    mixers: tuple[str, ...]
    patterns: tuple[str, ...]
    scores: Float[np.ndarray, "h p"]
    score_chance: Float[np.ndarray, " p"]
    shares: Float[np.ndarray, "h p"]
    chance: Float[np.ndarray, " p"]
    half_widths: Float[np.ndarray, "h p"]
    moved_shares: Float[np.ndarray, "h p"]
    sampled: bool
    rows: int
    offsets: Offsets = IN_PLACE

    def find_patterns(self) -> list[tuple[int, int]]:
        """Return which (head, pattern) surely hold more than chance, the clearest first.

        Surely: the low end of the interval lies at least `SHOWS` of the way from chance to 1. A
        single row of the batch has no interval, so it shows no pattern.
        """
        excess = (self.shares - self.chance) / (1 - self.chance)
        # Written so that NaN, which the interval of a single row is, shows no pattern.
        low = excess - self.half_widths / (1 - self.chance)
        order = np.argsort(-np.nan_to_num(excess, nan=-1.0), axis=None)
        pairs = zip(*np.unravel_index(order, excess.shape), strict=True)
        return [(int(h), int(p)) for h, p in pairs if low[h, p] >= SHOWS]

    def describe(self) -> Words:
        """Name the heads that surely show a pattern, or the one that comes nearest."""
        count = len(self.layers)
        says = self._summarize()
        alt = f"Dot plot of {count} heads by {', '.join(self.patterns)}. {says}"
        return Words("Head scores, share of |M|", says, self._explain_figure(), alt)

    def _summarize(self) -> str:
        shown = self.find_patterns()
        if shown:
            says = "; ".join(self._name(h, p) for h, p in shown[:NAMED])
            more = len({h for h, _ in shown} - {h for h, _ in shown[:NAMED]})
            others = "1 further head shows" if more == 1 else f"{more} further heads show"
            return f"{capitalize(says)}; {others} a pattern." if more else f"{capitalize(says)}."
        if np.isnan(self.shares).all():
            return "No head has any mass."
        excess = np.nan_to_num(self.shares - self.chance, nan=-1.0)
        h, p = np.unravel_index(int(excess.argmax()), excess.shape)
        best = self._name(int(h), int(p))
        if self.rows == 1:
            return f"Undecided, because one row of the batch has no interval: at most, {best}."
        return f"No head surely shows one of these patterns: at most, {best}."

    def _name(self, head: int, pattern: int) -> str:
        """Name a head and its share on a pattern, next to chance and to what it moves."""
        share, moved = self.shares[head, pattern], self.moved_shares[head, pattern]
        induction = self.patterns[pattern] == "induction"
        offset = self.offsets.read.get(int(self.layers[head]), 0) if induction else 0
        place = name_place(offset, PLACES[self.patterns[pattern]])
        text = f"head {self.layers[head]}.{self.heads[head]} puts {percent(float(share))} of its "
        text += f"mass on {place}"
        weighed = "" if np.isnan(moved) else f"{percent(float(moved))} by what it moves, "
        return f"{text} ({weighed}uniform {percent(float(self.chance[pattern]))})"

    def _explain_figure(self) -> str:
        reading = (
            "The share of a head's mass |M| on a kind of position, over those rows of its matrix "
            "that have such a position. The dashed line is what a uniform row would have there; "
            f"whiskers are 95 % intervals over {self.rows} rows of the batch. Induction: positions "
            "after an earlier occurrence of the row's token. Diamonds weigh each entry by "
            "‖M_ij v_j W_O‖, what it moves in the residual stream. Where the diamond is far from "
            "the dot, the head looks where it moves little."
        )
        reading += self.offsets.explain()
        if self.sampled:
            reading += f" For gated layers they use {GATED_TARGETS} random rows of the matrix."
        if len(self.layers) > LINES:
            reading += " Heads of a layer share a line."
        absent = [p for p, c in zip(self.patterns, self.chance, strict=True) if np.isnan(c)]
        if absent:
            reading += f" No token repeats on these rows, so there is no {' and no '.join(absent)}."
        if np.isnan(self.moved_shares).all(1).any():
            reading += " A mixer whose project is not linear in what it mixes has no diamonds."
        return reading

    def draw(self) -> go.Figure:
        """Draw one line per head, one panel per pattern."""
        panels = [
            Panel(
                title=name.replace(" ", "\n"),
                values=(self.shares[:, p], self.moved_shares[:, p]),
                half_widths=self.half_widths[:, p],
                chance=float(self.chance[p]),
                ends=(-0.08, 1.08),
                ticks={0.0: "0", 0.5: "50", 1.0: "100"},
                shown=".1%",
            )
            for p, name in enumerate(self.patterns)
            if not np.isnan(self.chance[p])
        ]
        axis = "share of the head's mass, %"
        return draw_dots(self.layers, self.heads, panels, ("|M|", "moved"), "uniform", axis)

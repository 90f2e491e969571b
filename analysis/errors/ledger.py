"""The errors by cause, each beside the share that random answers would get."""

import math
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from analysis.base import Finding, Words
from analysis.errors.causes import MASKED
from analysis.errors.out_of_reach import Reader
from analysis.plots.lines import order_lines
from analysis.plots.style import VERMILLION, make_whiskers, new_figure
from analysis.words import name_head, percent

TOP = 5
"""An error is outranked, not unknown, when the right value is among this many best tokens."""
FEW = 20
"""Below this many errors the words give counts instead of shares."""


@dataclass(frozen=True)
class Cause:
    """A cause of errors.

    Attributes:
        name: one of `analysis.errors.causes.CAUSES`.
        count: errors with this cause.
        share: of all errors.
        interval: 95 % interval of the share over rows (`bound_share`).
        chance: the share among random answers, which are other targets of the batch; for masks,
            the share of errors where lifting them gives the value of a random pair. NaN for the
            last two causes, which depend only on the rank of the right value.
        distance: median tokens from the stored value to the query; NaN where unknown.
    """

    name: str
    count: int
    share: float
    interval: tuple[float, float]
    chance: float
    distance: float


@dataclass(frozen=True)
class Ledger(Finding):
    """All errors at scored positions of some rows.

    Attributes:
        rows: how many.
        scored: scored positions in them.
        wrong: how many of those are answered wrong.
        interval: 95 % interval over rows of the share that is wrong.
        causes: those that can be detected on this task and model, in the order of precedence.
        pairs: whether the task says where keys and values are stored.
        neighbours: of answers that are another pair's value, the share from the pair stored next
            to the right one; NaN where there are none.
        neighbours_interval: its 95 % interval over rows.
        by_chance: what `neighbours` would be if all other pairs were equally likely.
        masked: errors whose key or value a dynamic mask hides, whether or not lifting it helps.
        reader: the SSD head by which decay is judged; None where no head reads the value.
        rank: median rank of the right answer among the errors.
    """

    rows: int
    scored: int
    wrong: int
    interval: tuple[float, float]
    causes: tuple[Cause, ...]
    pairs: bool
    neighbours: float
    neighbours_interval: tuple[float, float]
    by_chance: float
    masked: int
    reader: Reader | None
    rank: float

    def describe(self) -> Words:
        """Describe the most frequent causes."""
        title = "Errors by cause"
        if not self.wrong:
            rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
            says = f"There is no error among {self.scored:,} scored positions of {rows}: "
            says += f"the share of errors is at most {percent(self.interval[1])} (95 %)."
            return Words(title, says, "", says)
        shares = ", ".join(f"{cause.name} {percent(cause.share)}" for cause in self.causes)
        alt = f"Bars of the share of errors: {shares}."
        return Words(title, self._summarize(), self._explain_figure(), alt)

    def _summarize(self) -> str:
        share, verb = percent(self.wrong / self.scored), "is" if self.wrong == 1 else "are"
        says = f"{self.wrong:,} of {self.scored:,} answers ({share}) {verb} wrong"
        top = sorted((c for c in self.causes if c.count), key=lambda cause: -cause.count)[:3]
        if self.wrong < FEW:
            counts = ", ".join(f"{cause.name} ({cause.count})" for cause in top)
            return f"{says}, too few to say how common each cause is. By cause: {counts}."
        says += ": " + ", ".join(
            f"{percent(cause.share)} {cause.name}"
            + ("" if math.isnan(cause.chance) else f" (random answers: {percent(cause.chance)})")
            for cause in top
        )
        says += "."
        low, high = self.neighbours_interval
        if low > self.by_chance or high < self.by_chance:
            says += f" Of other pairs' values {percent(self.neighbours)} come from the pair "
            says += f"stored next to the right one (chance {percent(self.by_chance)})."
        return says

    def _explain_figure(self) -> str:
        names = [cause.name for cause in self.causes]
        reading = (
            f"Each error counts once, under the first cause that applies: {', '.join(names)}. "
            "Whiskers are 95 % intervals over rows. A diamond is the share that "
            "random answers, other targets of these rows, would have by the same rules. Outranked "
            f"means that the right value is among the {TOP} best tokens; this does not depend on "
            "the answer, so it has no diamond, and nor has unknown. In errors, the median rank of "
            f"the right answer is {self.rank:,.0f}."
        )
        if MASKED in names:
            reading += (
                f" A mask hides the key or value of {self.masked:,} errors. An error counts "
                "as masked away if the answer is right once the mask is lifted there; the diamond "
                "is how often lifting it gives the value of a random pair."
            )
        if self.reader is not None:
            reading += (
                f" Decay is judged in {name_head(self.reader.layer, self.reader.head)}, whose "
                f"weight on the right value is {self.reader.contrast:.1f} times that on others."
            )
        return reading

    def draw(self) -> go.Figure | None:
        """Draw a bar a cause, the first in precedence on top; None where there is no error."""
        if not self.wrong:
            return None
        names = [cause.name for cause in self.causes]
        share = np.array([cause.share for cause in self.causes])
        ends = np.array([cause.interval for cause in self.causes])
        fig = new_figure(height=84 + 34 * len(names) + 48)
        fig.add_bar(
            x=share.tolist(),
            y=names,
            orientation="h",
            name="errors",
            error_x=make_whiskers(share, ends),
            hovertemplate="%{y}: %{x:.1%}<extra></extra>",
        )
        fig.add_scatter(
            x=[cause.chance for cause in self.causes],
            y=names,
            mode="markers",
            name="random answers",
            marker={"symbol": "diamond", "size": 8, "color": VERMILLION},
            hovertemplate="%{y}, random answers: %{x:.1%}<extra></extra>",
        )
        for cause in self.causes:
            fig.add_annotation(
                text=f"<b>{percent(cause.share)}</b> ({cause.count:,})",
                x=np.nanmax([cause.interval[1], cause.chance]),
                y=cause.name,
                xanchor="left",
                xshift=8,
            )
        fig.update_xaxes(range=[0, 1.55], tickvals=[0, 0.25, 0.5, 0.75, 1], tickformat=".0%")
        fig.update_xaxes(title_text="share of errors", showline=False)
        order_lines(fig, names)
        return fig.update_layout(bargap=0.45, margin={"t": 84})

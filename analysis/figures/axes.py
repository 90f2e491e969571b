"""Axes, and what every kind of figure shares: panels, legends and lines to compare with."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Shaped
from plotly.subplots import make_subplots

from analysis.figures.theme import HEAD, MUTED, WIDTH, new_figure

Unit = Literal["number", "share", "change", "count"]
FORMATS = {
    "number": ("", ".3~g"),
    "share": (".0%", ".2%"),
    "change": ("+.2~%", "+.2%"),
    "count": (",", ",.0f"),
}
"""By unit, plotly's formats of an axis and of a hover text. A share is in [0, 1]."""
QUARTERS = (0, 0.25, 0.5, 0.75, 1)
WHOLE = -0.03, 1.03
"""Ends of an axis of shares between 0 and 1."""
TICKS = 3
"""Maximum number of labels of a logarithmic axis: panels are narrow on a phone."""
FOOT = 48
"""Height of axis labels and title below the panels, px."""
LEGEND = 20
"""Height of a line of the legend, px."""
LETTER, SYMBOL = 6.2, 46
"""Widths of a letter and of a symbol in the legend, px: how many lines the legend takes."""
ROOM = 540
"""Width of a line of the legend, px."""


@dataclass(frozen=True)
class Axis:
    """An axis.

    Attributes:
        unit: how values are written.
        scale: "steps" is log₂(step + 1): step 0 has a place, and early steps have room.
        ticks: labels by place; None: plotly chooses.
    """

    title: str = ""
    unit: Unit = "number"
    scale: Literal["linear", "log", "steps"] = "linear"
    ends: tuple[float, float] | None = None
    ticks: Mapping[float, str] | None = None

    @property
    def shown(self) -> str:
        """Plotly's format of a value in a hover text."""
        return FORMATS[self.unit][1]

    def place(self, values: Shaped[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Return where values stand on the axis."""
        found = np.asarray(values, np.float64)
        return np.log2(found + 1.0) if self.scale == "steps" else found

    def settings(self, shown: Iterable[float] = ()) -> dict[str, Any]:
        """Return plotly's settings of the axis.

        Args:
            shown: the values on it; an axis of steps, and a logarithmic one, end at the outermost,
                and one of shares where `find_ends` says.
        """
        values = [v for v in shown if math.isfinite(v)]
        found: dict[str, Any] = {"title_text": self.title, "tickformat": FORMATS[self.unit][0]}
        ends, ticks = self.ends, self.ticks
        if self.scale == "steps" and values:
            last = max(values)
            if ticks is None:
                middle = (4**k for k in range(1, 16) if 3 * 4**k <= last)
                ticks = {step: f"{step:,.0f}" for step in sorted({0, 1, *middle, last})}
            found |= {"range": [-0.15, math.log2(last + 1) + 0.15], "tickangle": 0}
        elif self.scale == "log":
            found["type"] = "log"
            if ends is None and ticks is None and (positive := [v for v in values if v > 0]):
                margin = max(1.15, (max(positive) / min(positive)) ** 0.08)
                ends = min(positive) / margin, max(positive) * margin
            if ends is not None:
                found["range"] = [math.log10(end) for end in ends]
                ticks = choose_log_ticks(*ends) if ticks is None else ticks
        elif self.unit == "share":
            found["range"] = list(ends or find_ends(values))
            if ends is None and ticks is None and found["range"] == list(WHOLE):
                found["tickvals"] = QUARTERS
            elif ends is None and ticks is None:
                found["tickformat"] = ".2~%"
        elif ends is not None:
            found["range"] = list(ends)
        if ticks is not None:
            places = self.place(np.array(list(ticks)))
            found |= {"tickvals": places.tolist(), "ticktext": list(ticks.values())}
        return found


def find_ends(shares: Sequence[float]) -> tuple[float, float]:
    """Return where an axis of shares ends: at 0 and 1, or close around what a quarter of it holds.

    The quarter is the lowest or the highest; its own end of the axis stays.
    """
    low, high = min(shares, default=0.0), max(shares, default=1.0)
    if low >= 0 and 0 < high <= QUARTERS[1]:
        return -0.03 * high, 1.06 * high
    if QUARTERS[-2] <= low < 1 and high <= 1:
        return 1 - 1.06 * (1 - low), 1 + 0.03 * (1 - low)
    return WHOLE


def choose_log_ticks(low: float, high: float) -> dict[float, str]:
    """Choose labels of a logarithmic axis by place: powers of ten, or 1, 2 and 5 times one.

    There are two or three, as evenly spaced as possible; fewer on an axis too short for them.
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5), tuple(range(1, 10))):
        places = [f * 10.0**d for d in decades for f in factors if low <= f * 10.0**d <= high]
        if len(places) > 1:
            break
    else:
        places = [float(f"{math.sqrt(low * high):.2g}")]
    step = -(-len(places) // TICKS)
    return {place: f"{place:g}" for place in places[(len(places) - 1) % step :: step]}


@dataclass
class Canvas:
    """Empty panels, and the names that their legend has already.

    Attributes:
        places: row and column of each panel, from 1.
        named: names in the legend; a name that comes again shares its entry.
    """

    fig: go.Figure
    places: list[tuple[int, int]]
    named: set[str] = field(default_factory=set)

    def enter(self, name: str) -> dict[str, Any]:
        """Return plotly's settings of a trace's name in the legend."""
        new = name not in self.named
        self.named.add(name)
        return {"name": html.escape(name), "legendgroup": name, "showlegend": new and name != ""}

    def finish(
        self, x: Axis, y: Axis, i: int, shown: tuple[Iterable[float], ...], *, own: bool = False
    ) -> None:
        """Set the axes of a panel; an axis that panels share has its title at the edge alone.

        Args:
            shown: values on the horizontal axis, and on the vertical one.
            own: whether other panels have another horizontal axis.
        """
        row, column = self.places[i]
        lowest = own or row == max(r for r, c in self.places if c == column)
        self.fig.update_xaxes(**x.settings(shown[0]), row=row, col=column)
        self.fig.update_yaxes(**y.settings(shown[1]), row=row, col=column)
        if not lowest:
            self.fig.update_xaxes(title_text=None, row=row, col=column)
        if column > 1:
            self.fig.update_yaxes(title_text=None, row=row, col=column)


def new_canvas(
    titles: Sequence[str],
    heights: Sequence[float],
    *,
    legend: Iterable[str] = (),
    across: int = 1,
    gap: int = 40,
    foot: int = FOOT,
    share_x: bool = False,
    share_y: bool = False,
    names_beside: Sequence[str] = (),
) -> Canvas:
    """Return empty panels, row by row, with room for their titles and a legend above them.

    Args:
        titles: of the panels; "" for none.
        heights: of each row of panels, px.
        legend: the names that it will have; one name needs no legend.
        gap: between rows of panels, px.
        foot: room below the panels, px.
        names_beside: what stands to the left of the panels; the legend begins to its right.
    """
    across = min(across, len(titles))
    lines = max(title.count("\n") + bool(title) for title in titles[:across])
    head = HEAD + 14 + 15 * lines
    names = {name: None for name in legend if name}
    widths = [SYMBOL + LETTER * len(name) for name in names]
    if len(names) > 1:  # those that do not fit into one line stand in columns of one width
        beside = LETTER * max(map(len, names_beside), default=0)
        room = min(ROOM, WIDTH - 20 - beside)
        columns = len(names) if sum(widths) <= room else max(1, int(room / max(widths)))
        head += LEGEND * math.ceil(len(names) / columns)
    inside = sum(heights) + gap * (len(heights) - 1)
    fig = make_subplots(
        rows=len(heights),
        cols=across,
        subplot_titles=[html.escape(title).replace("\n", "<br>") for title in titles],
        row_heights=list(heights),
        shared_xaxes=share_x,
        shared_yaxes=share_y,
        horizontal_spacing=0.05 if share_y else 0.1,
        vertical_spacing=gap / inside if len(heights) > 1 else 0,
        figure=new_figure(height=round(head + inside + foot)),
    )
    fig.update_annotations(font_size=11)
    above = 4 + 16 * lines
    fig.update_layout(
        margin={"t": head, "b": foot},
        showlegend=len(names) > 1,
        legend={
            "y": 1 + above / inside,
            "yref": "paper",
            "yanchor": "bottom",
            "tracegroupgap": 0,
        },
    )
    return Canvas(fig, [(i // across + 1, i % across + 1) for i in range(len(titles))])


def add_level(
    canvas: Canvas, i: int, name: str, level: float, shown: str, *, upright: bool
) -> None:
    """Add a dotted line to panel i at a value to compare with, such as chance.

    Args:
        name: of the line; "" for a thin line without a name, such as zero.
        shown: plotly's format of it.
        upright: whether values are on the horizontal axis.
    """
    row, column = canvas.places[i]
    look = {"color": MUTED, "width": 1.4 if name else 1, "dash": "dot" if name else "solid"}
    add = canvas.fig.add_vline if upright else canvas.fig.add_hline
    place: Any = {"row": row, "col": column, "exclude_empty_subplots": False}
    add(level, line=look, layer="below", **place)
    if name:
        canvas.fig.add_scatter(
            x=[None],
            y=[None],
            mode="lines",
            line=look,
            **canvas.enter(name),
            row=row,
            col=column,
        )

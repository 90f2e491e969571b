"""Accuracy against the width of the model, by row length."""

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from analysis.base import Finding, NotApplicableError, Words
from analysis.plots.style import new_figure
from analysis.sweeps.lines import SHARES, add_line, put_legend_below
from analysis.sweeps.settings import SettingResult, collect_settings, group_lines
from analysis.words import capitalize, percent, percents

WIDTH, LENGTH = "d_model", "seq_len"
PANEL = 210
"""Height of a panel, px."""


@dataclass(frozen=True)
class WidthCurves(Finding):
    """Accuracy by width: a panel for each row length, a line for each setting.

    Attributes:
        settings: each at its best learning rate.
    """

    settings: tuple[SettingResult, ...]

    @property
    def lengths(self) -> list[int | None]:
        """The row lengths, ascending; one None if the runs have only one."""
        return sorted(
            {s.factors.get(LENGTH) for s in self.settings}, key=lambda length: length or 0
        )

    def describe(self) -> Words:
        """Name the settings with the highest and the lowest mean at each row length."""
        sentences = []
        for length in self.lengths:
            here = [s for s in self.settings if s.factors.get(LENGTH) == length]
            best, least = max(here, key=lambda s: s.mean), min(here, key=lambda s: s.mean)
            place = "" if length is None else f"At {length:,} tokens, "
            means = f"the highest mean is that of {_quote(best)}, the lowest that of "
            means += _quote(least)
            if best.mean == least.mean:
                others = "" if len(here) == 1 else f", like {len(here) - 1} more"
                means = f"the mean is that of {_quote(best)}{others}"
            sentences.append(f"{place}{means}.")
        says = " ".join(map(capitalize, sentences))
        return Words(
            "Accuracy by width",
            says,
            "A point is the mean over seeds on test rows, at the learning rate that is best on "
            "validation rows. Whiskers are 95 % intervals: over seeds, and over rows where those "
            "are wider. Intervals that overlap show no difference.",
            f"Lines of accuracy by d_model, a panel for each row length. {says}",
        )

    def draw(self) -> go.Figure:
        """Draw a panel for each row length."""
        lengths, lines = self.lengths, group_lines(self.settings, (WIDTH, LENGTH))
        columns = min(2, len(lengths))
        rows = -(-len(lengths) // columns)
        plot = PANEL * rows + 124 + 40 * (rows - 1)
        fig = make_subplots(
            rows=rows,
            cols=columns,
            shared_yaxes=True,
            subplot_titles=["" if n is None else f"{n:,} tokens" for n in lengths],
            horizontal_spacing=0.06,
            vertical_spacing=0.16 if rows > 1 else 0,
            figure=new_figure(height=plot),
        )
        widths = sorted({s.factors[WIDTH] for s in self.settings})
        for number, (name, settings) in enumerate(lines.items()):
            for i, length in enumerate(lengths):
                here = [s for s in settings if s.factors.get(LENGTH) == length]
                here.sort(key=lambda s: s.factors[WIDTH])
                add_line(
                    fig,
                    name,
                    number,
                    [s.factors[WIDTH] for s in here] or [None],
                    [s.mean for s in here] or [float("nan")],
                    [s.interval for s in here] or [(float("nan"), float("nan"))],
                    [f"{s.name()}: {_format_interval(s)}" for s in here] or [""],
                    row=i // columns + 1,
                    col=i % columns + 1,
                    showlegend=i == 0,
                )
        fig.update_annotations(font_size=11)
        fig.update_xaxes(type="log", tickvals=widths, ticktext=[str(width) for width in widths])
        fig.update_xaxes(title_text="d_model")
        fig.update_yaxes(**SHARES)
        fig.update_yaxes(title_text="test accuracy", col=1)
        return put_legend_below(fig, lines, plot)


def _quote(setting: SettingResult) -> str:
    return f"{setting.name((LENGTH,))} ({_format_interval(setting)})"


def _format_interval(setting: SettingResult) -> str:
    low, high = percents(*setting.interval)
    seeds = len(setting.seeds)
    return f"{percent(setting.mean)}, 95 %: {low} … {high}, {seeds} seed{'s' * (seeds > 1)}"


def measure(table: pl.DataFrame) -> Sequence[WidthCurves]:
    """Return the curves of a sweep's table.

    Raises:
        NotApplicableError: when the runs that have ended have one width.
    """
    settings = tuple(s for s in collect_settings(table) if s.seeds and s.factors.get(WIDTH))
    if len({s.factors[WIDTH] for s in settings}) < 2:
        raise NotApplicableError("the runs that have ended have one width")
    return [WidthCurves(settings)]

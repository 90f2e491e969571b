"""What accuracy costs: seconds of training against accuracy, a point for each setting."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import polars as pl

from analysis.base import Finding, NotApplicableError, Words
from analysis.plots.style import MUTED, make_whiskers, new_figure
from analysis.sweeps.lines import HEIGHT, SHARES, choose_look, put_legend_below
from analysis.sweeps.settings import RATE, SettingResult, collect_settings
from analysis.words import percent


@dataclass(frozen=True)
class AccuracyCosts(Finding):
    """Accuracy against seconds of training.

    Attributes:
        settings: each at its best learning rate.
    """

    settings: tuple[SettingResult, ...]

    @property
    def frontier(self) -> list[SettingResult]:
        """The settings than which none is both cheaper and as accurate, cheapest first."""
        found: list[SettingResult] = []
        for setting in sorted(self.settings, key=lambda s: (_cost(s), -s.mean)):
            if not found or setting.mean > found[-1].mean:
                found.append(setting)
        return found

    def describe(self) -> Words:
        """Name the settings on the frontier."""
        parts = [
            f"{s.name([RATE])} ({percent(s.mean)} in {_cost(s):,.0f} s)" for s in self.frontier
        ]
        says = f"No other setting had a higher mean for less time than: {'; '.join(parts)}."
        return Words(
            "Accuracy by cost",
            says,
            "Across: mean seconds of training of a run, without evaluations, as measured beside "
            "whatever else the machine did; up: mean test accuracy with its 95 % interval. The "
            "line joins the settings that are the most accurate at their cost.",
            f"Points of accuracy by seconds of training. {says}",
        )

    def draw(self) -> go.Figure:
        """Draw a point for each setting, and the frontier."""
        fig = new_figure(height=HEIGHT)
        fig.add_scatter(
            x=[_cost(s) for s in self.frontier],
            y=[s.mean for s in self.frontier],
            mode="lines",
            line={"color": MUTED, "dash": "dot", "width": 1.5},
            name="most accurate at its cost",
            hoverinfo="skip",
        )
        for number, setting in enumerate(self.settings):
            look, name = choose_look(number), html.escape(setting.name([RATE]))
            said = f"{name}: {percent(setting.mean)}, {_cost(setting):,.1f} s"
            if setting.parameters is not None:
                said += f", {setting.parameters:,} parameters"
            fig.add_scatter(
                x=[_cost(setting)],
                y=[setting.mean],
                error_y=make_whiskers(np.array([setting.mean]), np.array([setting.interval]), 1, 3),
                mode="markers",
                marker={"symbol": look["symbol"], "color": look["color"], "size": 9},
                name=name,
                hovertemplate=f"{said}<extra></extra>",
            )
        fig.update_xaxes(title_text="seconds of training", type="log")
        fig.update_yaxes(title_text="test accuracy", **SHARES)
        return put_legend_below(fig, ["", *(s.name([RATE]) for s in self.settings)], HEIGHT)


def _cost(setting: SettingResult) -> float:
    return sum(setting.seconds) / len(setting.seconds)


def measure(table: pl.DataFrame) -> Sequence[AccuracyCosts]:
    """Return the costs of a sweep's table.

    Raises:
        NotApplicableError: when fewer than two settings have ended.
    """
    settings = tuple(s for s in collect_settings(table) if s.seeds and _cost(s) > 0)
    if len(settings) < 2:
        raise NotApplicableError("fewer than two settings have ended")
    return [AccuracyCosts(settings)]

"""The test accuracy of runs, and their accuracy by training step."""

import html
from dataclasses import dataclass

import plotly.graph_objects as go

from analysis.base import Finding, Words
from analysis.pages.run_columns import RunColumn
from analysis.plots.lines import draw_references
from analysis.plots.style import COLORS, DASHES, MUTED, SYMBOLS, new_figure
from analysis.words import count_decimals, format_counts, join_names, percent

DOTTED = " Dotted: rules that need no training."
LINE = 16
"""Height of a label of a reference, pixels."""


@dataclass(frozen=True)
class RunAccuracies(Finding):
    """The test accuracy of runs.

    Attributes:
        runs: in the order given.
        references: accuracies of the task's baselines, by name.
    """

    runs: tuple[RunColumn, ...]
    references: dict[str, float]

    def describe(self) -> Words:
        """Say which accuracies are above what needs no training; `Ranking` compares runs."""
        title = "Test accuracy"
        rows = format_counts(run.test_rows for run in self.runs)
        reading = f"Whiskers are 95 % intervals over {rows} test rows of each run."
        known = [run for run in self.runs if run.accuracy is not None]
        if not known:
            says = "None of these runs has a result yet."
            return Words(title, says, reading, says)
        decimals = count_decimals([run.accuracy or 0.0 for run in known])
        listed = ", ".join(f"{run.name} {percent(run.accuracy or 0.0, decimals)}" for run in known)
        says = f"Test accuracy: {listed}."
        rivals = {name: score for name, score in self.references.items() if name != "oracle"}
        if rivals:
            rival = max(rivals, key=rivals.__getitem__)
            above = [run.name for run in known if run.interval and run.interval[0] > rivals[rival]]
            text = "chance" if rival == "chance" else f"the best shortcut, “{rival}”"
            whose = "of all runs lie" if above else "of no run lie"
            if 0 < len(above) < len(self.runs):
                whose = f"of {join_names(above)} alone {'lie' if len(above) > 1 else 'lies'}"
            what = "interval" if whose.endswith("lies") else "intervals"
            says += f" The {what} {whose} above {text}, {percent(rivals[rival])}."
            reading += DOTTED
        return Words(title, says, reading, f"Dots of test accuracy. {says}")

    def draw(self) -> go.Figure:
        """Draw a dot and an interval per run, the first run on top."""
        names = [html.escape(run.name) for run in self.runs]
        decimals = count_decimals([run.accuracy or 0.0 for run in self.runs])
        fig = new_figure(height=130 + 34 * len(names) + LINE * len(self.references))
        for i, run in enumerate(self.runs):
            if run.accuracy is None or run.interval is None:
                continue
            fig.add_scatter(
                x=[run.accuracy],
                y=[names[i]],
                mode="markers",
                marker={"size": 10, "symbol": SYMBOLS[i % len(SYMBOLS)]},
                error_x={
                    "type": "data",
                    "symmetric": False,
                    "array": [run.interval[1] - run.accuracy],
                    "arrayminus": [run.accuracy - run.interval[0]],
                },
                hovertemplate=f"{names[i]}: %{{x:.2%}} ({run.test_rows:,} test rows)"
                "<extra></extra>",
            )
            fig.add_annotation(
                text=percent(run.accuracy, decimals),
                x=1.03,
                y=names[i],
                xanchor="left",
                yanchor="middle",
            )
        for i, (name, level) in enumerate(sorted(self.references.items(), key=lambda r: r[1])):
            fig.add_vline(level, line={"color": MUTED, "dash": "dot"}, layer="below")
            fig.add_annotation(
                text=html.escape(f"{name} {percent(level)}"),
                x=level,
                y=1,
                yref="paper",
                yanchor="bottom",
                yshift=LINE * (len(self.references) - 1 - i),
                xanchor="left" if level < 0.5 else "right",
            )
        fig.update_xaxes(range=[-0.02, 1.2], tickvals=[0, 0.25, 0.5, 0.75, 1], tickformat=".0%")
        fig.update_xaxes(title_text="accuracy at scored positions")
        fig.update_yaxes(
            categoryorder="array", categoryarray=names[::-1], automargin="left", showgrid=False
        )
        return fig.update_layout(showlegend=False, margin_t=64 + LINE * len(self.references))


@dataclass(frozen=True)
class RunCurves(Finding):
    """The accuracy of runs by training step.

    Attributes:
        runs: in the order given.
        references: accuracies of the task's baselines, by name.
    """

    runs: tuple[RunColumn, ...]
    references: dict[str, float]

    def describe(self) -> Words:
        """Say when half of the answers of each run are right for the first time."""
        half, tried = {}, set()
        for run in self.runs:
            right = run.held_out >= 0.5
            if run.full_from is None:
                continue
            full = run.held_out_steps > run.full_from
            right &= full
            if full.any():
                tried.add(run.name)
            if right.any():
                half[run.name] = int(run.held_out_steps[right.argmax()])
        said = [
            f"{run.name} by step {half[run.name]:,}"
            if run.name in half
            else f"{run.name} {'not' if run.name in tried else 'not evaluated'} by step "
            f"{run.steps:,}"
            for run in self.runs
        ]
        says = gist = f"Half of the answers are right at full row length: {'; '.join(said)}."
        counts = [int(count) for run in self.runs for count in run.held_out_rows]
        rows = f" ({format_counts(counts)} at each evaluation)" if counts else ""
        reading = (
            f"Accuracy on held-out rows{rows} of the length that the run trains on at that step, "
            "one line per run. A large symbol is the test accuracy of the result."
        )
        if self.references:
            reading += DOTTED
        grown = [run for run in self.runs if len(run.stages) > 1]
        if grown:
            says += " Steps at each row length: "
            says += "; ".join(
                f"{run.name} {', '.join(f'{steps:,} at {size:,}' for size, steps in run.stages)}"
                for run in grown
            )
            says += "."
        alt = f"Lines of accuracy. {says}"
        return Words("Accuracy by training step", says, reading, alt, gist=gist)

    def draw(self) -> go.Figure:
        """Draw accuracy by step; each run has a colour, a dash and a symbol."""
        fig = new_figure(height=360 + 14 * len(self.runs))
        for i, run in enumerate(self.runs):
            color = COLORS[i % len(COLORS)]
            fig.add_scatter(
                x=run.held_out_steps,
                y=run.held_out,
                mode="lines+markers",
                name=html.escape(run.name),
                line={"dash": DASHES[i % len(DASHES)], "width": 2, "color": color},
                marker={"symbol": SYMBOLS[i % len(SYMBOLS)], "size": 6},
                customdata=run.held_out_rows,
                hovertemplate=f"{html.escape(run.name)}, step %{{x:,}}: %{{y:.2%}} "
                "(%{customdata:,} held-out rows)<extra></extra>",
            )
            if run.tested_at is not None:
                fig.add_scatter(
                    x=[run.tested_at],
                    y=[run.accuracy],
                    mode="markers",
                    marker={"symbol": SYMBOLS[i % len(SYMBOLS)], "size": 13, "color": color},
                    showlegend=False,
                    cliponaxis=False,
                    hovertemplate=f"{html.escape(run.name)}: %{{y:.2%}} "
                    f"({run.test_rows:,} test rows)<extra></extra>",
                )
        draw_references(fig, self.references, {})
        fig.update_xaxes(title_text="training step", tickformat=",", rangemode="tozero")
        fig.update_yaxes(title_text="accuracy")
        return fig.update_layout(margin_t=64 + 14 * len(self.runs))

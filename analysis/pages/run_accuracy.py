"""Which run is best? Test accuracy of each, and accuracy by training step."""

import html
from dataclasses import dataclass

import plotly.graph_objects as go

from analysis.base import Finding, Words
from analysis.pages.run_columns import RunColumn
from analysis.plots.style import DASHES, MUTED, SYMBOLS, new_figure
from analysis.words import percent


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
        """Say which run is best, and which cannot be told from it by intervals."""
        known = [run for run in self.runs if run.accuracy is not None]
        title = "Test accuracy"
        reading = "Whiskers are 95 % Wilson intervals, as if scored positions were independent."
        if not known:
            says = "None of these runs has a result yet."
            return Words(title, says, reading, says)
        best = max(known, key=lambda run: run.accuracy or 0.0)
        assert best.interval is not None
        rivals = [run for run in known if run is not best and run.interval is not None]
        level = [run.name for run in rivals if run.interval and run.interval[1] >= best.interval[0]]
        chance = self.references.get("chance")
        if chance is not None and best.interval[0] <= chance:
            says = f"No run is sure to stand above chance, {percent(chance)}."
            return Words(title, says, reading, f"Dots of test accuracy. {says}")
        says = f"{best.name} is most often right, {percent(best.accuracy or 0.0)}"
        if level:
            says += f"; {', '.join(level)} cannot be told from it."
        elif rivals:
            second = max(rivals, key=lambda run: run.accuracy or 0.0)
            says += f", clear of {second.name}, {percent(second.accuracy or 0.0)}."
        else:
            says += "; no other run has a result."
        listed = ", ".join(f"{run.name} {percent(run.accuracy or 0.0)}" for run in known)
        return Words(title, says, reading, f"Dots of test accuracy: {listed}.")

    def draw(self) -> go.Figure:
        """Draw a dot and an interval per run, the first run on top."""
        names = [html.escape(run.name) for run in self.runs]
        fig = new_figure(height=130 + 34 * len(names))
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
                hovertemplate=f"{names[i]}: %{{x:.2%}}<extra></extra>",
            )
            fig.add_annotation(
                text=percent(run.accuracy), x=1.03, y=names[i], xanchor="left", yanchor="middle"
            )
        for name, level in self.references.items():
            fig.add_vline(level, line={"color": MUTED, "dash": "dot"}, layer="below")
            fig.add_annotation(
                text=name,
                x=level,
                y=1,
                yref="paper",
                yanchor="bottom",
                xanchor="left" if level < 0.5 else "right",
            )
        fig.update_xaxes(range=[-0.02, 1.2], tickvals=[0, 0.25, 0.5, 0.75, 1], tickformat=".0%")
        fig.update_xaxes(title_text="accuracy at scored positions")
        fig.update_yaxes(
            categoryorder="array", categoryarray=names[::-1], automargin="left", showgrid=False
        )
        return fig.update_layout(showlegend=False)


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
        """Say which run learns first: the first evaluation at which half is right."""
        half = {}
        for run in self.runs:
            right = run.held_out >= 0.5
            if run.full_from is None:
                continue
            right &= run.held_out_steps > run.full_from
            if right.any():
                half[run.name] = int(run.held_out_steps[right.argmax()])
        never = [run.name for run in self.runs if run.name not in half]
        ordered = sorted(half, key=half.__getitem__)
        said = [f"{name} by step {half[name]:,}" for name in ordered]
        if never:
            said.append(f"{', '.join(never)} never")
        says = gist = f"Half of the answers are right at full row length: {'; '.join(said)}."
        reading = (
            "Accuracy on held-out rows of the length that the run trains on at that step, one "
            "line per run."
        )
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
            fig.add_scatter(
                x=run.held_out_steps,
                y=run.held_out,
                mode="lines+markers",
                name=html.escape(run.name),
                line={"dash": DASHES[i % len(DASHES)], "width": 2},
                marker={"symbol": SYMBOLS[i % len(SYMBOLS)], "size": 6},
                hovertemplate=f"{html.escape(run.name)}, step %{{x:,}}: %{{y:.2%}}<extra></extra>",
            )
        for level in self.references.values():
            fig.add_hline(level, line={"color": MUTED, "dash": "dot"}, layer="below")
        fig.update_xaxes(title_text="training step", tickformat=",", rangemode="tozero")
        fig.update_yaxes(title_text="accuracy", tickformat=".0%", range=[-0.03, 1.05])
        return fig.update_layout(margin_t=64 + 14 * len(self.runs))

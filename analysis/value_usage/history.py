"""Which values the tokens of a layer choose over training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int
from plotly.subplots import make_subplots

from analysis.base import Finding, Words
from analysis.plots.panels import name_legend, place_legend
from analysis.plots.steps import add_step_axis, scale_steps
from analysis.plots.style import COLORS, DASHES, HEAD, SYMBOLS, make_whiskers, new_figure
from analysis.statistics.distributions import effective_number
from analysis.statistics.estimates import thin
from analysis.statistics.intervals import bootstrap
from analysis.value_usage.choices import (
    ValueChoices,
    expect_churn,
    find_changed,
    find_value_layers,
    measure_loads,
    measure_margins,
    measure_ties,
    record_choices,
)
from analysis.words import percent
from lab.training.run import Run
from tasks.base import Batch, count_rows

HISTORY_TOKENS = 2**11
"""Number of tokens whose choices are followed over training."""
STEPS = 24
"""Maximum number of steps of a run at which their choices are recorded."""
LINES = len(COLORS)
"""Maximum number of values with a line of their own."""
HEIGHTS, GAP = np.array([0.44, 0.28, 0.28]), 0.11
"""Heights of the panels, as shares of their sum, and the gap between them, of the figure's."""


@dataclass(frozen=True)
class ValueHistory(Finding):
    """A layer's choices over training, on a few fixed rows.

    Attributes:
        layer: index of the block.
        steps: of the run, from 0.
        shares: share of tokens that choose each value.
        used: number of values that any of them chooses.
        effective: e^H of the shares.
        ties: share of tokens whose k-th and next score tie.
        churn: share of tokens that choose another set of values than at the step before; NaN at
            the first step.
        churn_interval: its 95 % interval, by resampling rows; NaN for fewer than two rows.
        churn_dealt: its mean if the step's choices were shuffled among the tokens.
        zero_keys: whether all keys are zero at the first step.
    """

    layer: int
    steps: Int[np.ndarray, " steps"]
    shares: Float[np.ndarray, "steps n_v"]
    used: Int[np.ndarray, " steps"]
    effective: Float[np.ndarray, " steps"]
    ties: Float[np.ndarray, " steps"]
    churn: Float[np.ndarray, " steps"]
    churn_interval: Float[np.ndarray, "steps 2"]
    churn_dealt: Float[np.ndarray, " steps"]
    zero_keys: bool

    def describe(self) -> Words:
        """Describe the values used first and last, and how many tokens still change."""
        steps, used, n_values = self.steps, self.used, self.shares.shape[1]
        says = f"At step {steps[0]:,}, tokens use {used[0]} of {n_values} values"
        says += f" (e^H {self.effective[0]:.2f})"
        # All are used, whatever the keys are, where a token chooses all.
        if self.zero_keys and used[0] < n_values:
            says += ", because all keys are zero and every score ties"
        says += f"; at step {steps[-1]:,}, they use {used[-1]} (e^H {self.effective[-1]:.2f})"
        if used.min() == used.max():
            says += ", as at every step between" if len(steps) > 2 else ""
        elif used[0] < used.max():
            first = int(np.argmax(used > used[0]))
            says += f"; more than at first are used by step {steps[first]:,}"
        says += f"; {self._summarize_churn()}."
        gist = (
            f"Tokens use {used[0]} of {n_values} values at step {steps[0]:,} and {used[-1]} at "
            f"step {steps[-1]:,}."
        )
        reading = (
            "The same rows at every step; steps are spaced by log₂(step + 1). Shuffled: the share "
            "of tokens that would change if the later choices were shuffled among the tokens. "
            "Whiskers: 95 % intervals by resampling rows."
        )
        if n_values > LINES:
            reading += f" The {LINES} values with the highest share at any step are shown."
        return Words(
            title=f"Layer {self.layer} · use of values over training",
            says=says,
            reading=reading,
            alt=f"Lines of use, evenness and churn by step. {says}",
            gist=gist,
        )

    def _summarize_churn(self) -> str:
        low, high = self.churn_interval[-1]
        interval = (
            "one row: no interval" if math.isnan(low) else f"[{percent(low)}, {percent(high)}]"
        )
        return (
            f"between steps {self.steps[-2]:,} and {self.steps[-1]:,}, "
            f"{percent(float(self.churn[-1]))} of the tokens change their values ({interval}; "
            f"shuffled {percent(float(self.churn_dealt[-1]))})"
        )

    def draw(self) -> go.Figure:
        """Draw shares, evenness and churn by step, one below the other."""
        fig = make_subplots(
            rows=3,
            cols=1,
            shared_xaxes=True,
            vertical_spacing=GAP,
            row_heights=HEIGHTS.tolist(),
            figure=new_figure(height=600),
        )
        x, steps = scale_steps(self.steps), [f"{step:,}" for step in self.steps]
        most = np.sort(np.argsort(-self.shares.max(0), kind="stable")[:LINES]).tolist()
        panels: tuple[dict[str, Float[np.ndarray, " steps"]], ...] = (
            {f"value {value}": self.shares[:, value] for value in most},
            {"values used": self.used.astype(float), "e^H, as many used evenly": self.effective},
            {
                "changed since": self.churn,
                "tied at the last place": self.ties,
                "changed if shuffled": self.churn_dealt,
            },
        )
        for row, lines in enumerate(panels, start=1):
            for i, (name, y) in enumerate(lines.items()):
                fig.add_scatter(
                    x=x,
                    y=y,
                    mode="lines+markers",
                    line={"color": COLORS[i], "dash": DASHES[i], "width": 1.6},
                    marker={"symbol": SYMBOLS[i], "size": 6},
                    name=name,
                    legend=name_legend(row),
                    text=steps,
                    hovertemplate=f"{name}, step %{{text}}: %{{y:.3g}}<extra></extra>",
                    error_y=make_whiskers(y, self.churn_interval, 1, 0)
                    if y is self.churn
                    else None,
                    cliponaxis=False,
                    row=row,
                    col=1,
                )
        add_step_axis(fig, self.steps)
        for row in (1, 2):
            fig.update_xaxes(title_text=None, showticklabels=False, row=row, col=1)
        fig.update_yaxes(title_text="values", range=[0, 1.08 * self.shares.shape[1]], row=2, col=1)
        for row in (1, 3):
            fig.update_yaxes(title_text="share of tokens", tickformat=".0%", row=row, col=1)
        fig.update_yaxes(range=[-0.03, 1.06], row=3, col=1)
        heights = HEIGHTS * (1 - 2 * GAP)
        for row in range(3):
            place_legend(fig, row + 1, 1 - heights[:row].sum() - GAP * row)
        return fig.update_layout(margin_t=HEAD + 48)


def measure_histories(run: Run, batch: Batch, rng: np.random.Generator) -> list[ValueHistory]:
    """Record what tokens of the batch's first rows choose, over the steps of a run, by layer."""
    steps = thin(run.list_steps(), STEPS)
    rows = batch[: count_rows(HISTORY_TOKENS, batch.inputs.shape[1])].to("cpu")
    choices: list[dict[int, ValueChoices]] = []
    zero: dict[int, bool] = {}
    for step in steps:
        model = run.load_model(step)
        choices.append(record_choices(model, rows))
        layers = find_value_layers(model)
        zero = zero or {i: not layer.value_keys.any().item() for i, layer in layers.items()}
    return [
        _measure_history(layer, steps, [at[layer] for at in choices], zero[layer], rng)
        for layer in zero
    ]


def _measure_history(
    layer: int,
    steps: Sequence[int],
    choices: Sequence[ValueChoices],
    zero_keys: bool,
    rng: np.random.Generator,
) -> ValueHistory:
    shares = np.stack([measure_loads(at.indices, at.scores.shape[-1]) for at in choices])
    moves = [(old.indices, new.indices) for old, new in pairwise(choices)]
    of_rows = [find_changed(*move).mean(-1) for move in moves]
    unknown = (math.nan, math.nan)
    return ValueHistory(
        layer=layer,
        steps=np.array(steps),
        shares=shares,
        used=(shares > 0).sum(-1),
        effective=effective_number(shares),
        ties=np.array([measure_ties(measure_margins(at)) for at in choices]),
        churn=np.array([math.nan, *(float(rows.mean()) for rows in of_rows)]),
        churn_interval=np.array([unknown, *(bootstrap(rows, rng) for rows in of_rows)]),
        churn_dealt=np.array([math.nan, *(expect_churn(*move) for move in moves)]),
        zero_keys=zero_keys,
    )

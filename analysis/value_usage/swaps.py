"""How the accuracy changes when tokens get other values than they chose."""

import html
import math
from dataclasses import dataclass, replace

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float
from plotly.subplots import make_subplots
from torch import Tensor

from analysis.base import Finding, Subject, Words
from analysis.plots.lines import name_lines
from analysis.plots.panels import name_legend, place_legend, stack_panels
from analysis.plots.style import COLORS, HEAD, MUTED, SYMBOLS, make_whiskers, new_figure
from analysis.scoring import scored
from analysis.statistics.estimates import (
    SURE,
    Estimate,
    estimate_accuracy,
    estimate_ratio,
    sum_by_row,
    thin,
    westfall_young,
)
from analysis.value_usage.choices import LAYERS
from analysis.value_usage.reassignment import (
    Reassign,
    force_value,
    score_reassigned,
    shuffle_choices,
)
from analysis.words import name_layers, percent
from tasks.base import count_rows

MOST = 5
"""Maximum number of values of a layer that are forced, those that are chosen most."""
PASSES = 64
"""Maximum number of swaps in all, beyond one value for each layer."""
TOKENS = 2**18
"""Number of tokens answered again in all; each swap gets as many rows as that allows."""
FEWEST_ROWS = 4
LINE, GAP = 26, 48
"""Height of a line of the figure, and of the gap between panels, which holds a legend, px."""


@dataclass(frozen=True)
class Swap:
    """How the accuracy changes when tokens get other values, at the weights of their own.

    Attributes:
        layer: index of the block.
        value: the value that is forced; None where the tokens' own are shuffled among them.
        role: of the tokens it is forced on, index into role_names; None for all tokens.
        moved: share of all tokens that get a value they had not chosen.
        change: accuracy after less accuracy before, in [−1, 1]; chance 0.
        p: that the worst of all these swaps costs as much if none costs anything.
    """

    layer: int
    value: int | None
    role: int | None
    moved: float
    change: Estimate
    p: float

    def summarize_change(self) -> str:
        """Return the change of accuracy in points, with its interval."""
        value, low, high = (100 * x for x in (self.change.value, self.change.low, self.change.high))
        return f"{value:+.1f} points [{low:+.1f}, {high:+.1f}]"


@dataclass(frozen=True)
class Swaps(Finding):
    """Every swap, and the accuracy before.

    Attributes:
        accuracy: before any swap; chance is the task's.
        swaps: by layer, value and role, the shuffle of a layer first.
        placebo: largest change of a hidden state when tokens are forced to what they chose.
        role_names: the task's.
        forced: most values that are forced in a layer, those that are chosen most.
        left_out: whether there are more values, or more layers.
    """

    accuracy: Estimate
    swaps: tuple[Swap, ...]
    placebo: float
    role_names: tuple[str, ...]
    forced: int
    left_out: bool

    def describe(self) -> Words:
        """Describe the swap that costs most, if any is shown to cost."""
        says = self._summarize()
        reading = (
            f"On these rows {percent(self.accuracy.value)} of the answers are right (chance "
            f"{percent(self.accuracy.chance)}). Whiskers: 95 % intervals by resampling rows, one "
            "swap at a time. p: the share of random sign flips of the rows in which the worst of "
            f"all swaps costs as much; a swap is shown to cost if p < {SURE}. A forced value takes "
            "over the score, and so the weight, of the value that it replaces. Forcing each "
            "token's own choice "
        )
        reading += (
            "changes nothing."
            if self.placebo == 0
            else f"moves a hidden state by at most {self.placebo:.2g}."
        )
        if self.left_out:
            layers = sorted({swap.layer for swap in self.swaps})
            reading += f" Only the values used most are forced, up to {self.forced} per layer, in "
            reading += f"{name_layers(layers)}."
        return Words(
            title="Change of accuracy when values are forced",
            says=says,
            reading=reading,
            alt=f"Dots of accuracy change by value. {says}",
        )

    def _summarize(self) -> str:
        right, n = self.accuracy, len(self.swaps)
        # NaN, the interval of a single row, is not above chance either.
        if not right.low > right.chance:
            return (
                f"{percent(right.value)} of the answers are right, not shown to be above chance "
                f"({percent(right.chance)}): swaps cannot tell which values matter."
            )
        costly = [swap for swap in self.swaps if swap.change.value < 0 and swap.p < SURE]
        if not costly:
            least = min(swap.p for swap in self.swaps)
            return f"None of {n} swaps is shown to cost accuracy (smallest p {least:.2g})."
        worst = min(costly, key=lambda swap: swap.change.value)
        says = f"{self._name_swap(worst)} costs most, {worst.summarize_change()} "
        says += f"(p {worst.p:.2g}, the worst of {n})"
        if worst.value is not None:
            same = (s for s in self.swaps if s.layer == worst.layer and s.value is None)
            says += f"; shuffling the layer's choices changes it by {next(same).summarize_change()}"
        return f"{says}."

    def _name_swap(self, swap: Swap) -> str:
        if swap.value is None:
            return f"Shuffling the choices of layer {swap.layer} among its tokens"
        role = swap.role
        group = "every token" if role is None else f"the tokens of role {self.role_names[role]}"
        return f"Forcing value {swap.value} on {group} in layer {swap.layer}"

    def draw(self) -> go.Figure:
        """Draw the changes, a panel per layer, a line per group of tokens, a mark per value."""
        layers = sorted({swap.layer for swap in self.swaps})[:LAYERS]
        roles = sorted({swap.role for swap in self.swaps if swap.role is not None})
        groups = [None, *roles]
        labels = ["shuffled", "all tokens", *(html.escape(self.role_names[r]) for r in roles)]
        panel = LINE * len(labels)
        height, spacing = stack_panels(len(layers), panel, GAP)
        fig = make_subplots(
            rows=len(layers),
            cols=1,
            shared_xaxes=True,
            vertical_spacing=spacing,
            figure=new_figure(height=HEAD + 56 + height + 52),
        )
        for row, layer in enumerate(layers, start=1):
            mine = [swap for swap in self.swaps if swap.layer == layer]
            values = list(dict.fromkeys(swap.value for swap in mine))
            forced = sorted(value for value in values if value is not None)
            fig.add_vline(0, line={"color": MUTED, "width": 1, "dash": "dot"}, row=row, col=1)  # type: ignore[arg-type]
            for value in values:
                some = [swap for swap in mine if swap.value == value]
                changes = [swap.change for swap in some]
                if value is None:
                    name, color, symbol, y = "own, shuffled", MUTED, "cross", [0.0]
                else:
                    place = forced.index(value)
                    spread = 0.6 * ((place + 0.5) / len(forced) - 0.5)
                    name, color, symbol = f"value {value}", COLORS[place], SYMBOLS[place]
                    y = [1 + groups.index(swap.role) + spread for swap in some]
                fig.add_scatter(
                    x=[change.value for change in changes],
                    y=y,
                    mode="markers",
                    marker={"color": color, "symbol": symbol, "size": 8},
                    error_x=make_whiskers(
                        np.array([c.value for c in changes]),
                        np.array([(c.low, c.high) for c in changes]),
                        1.2,
                        0,
                    ),
                    name=name,
                    legend=name_legend(row),
                    showlegend=value is not None,
                    cliponaxis=False,
                    hovertemplate=f"layer {layer}, {name}: %{{x:+.2%}}<extra></extra>",
                    row=row,
                    col=1,
                )
            place_legend(fig, row, 1 - (row - 1) * (panel + GAP) / height)
            fig.update_yaxes(title_text=f"layer {layer}", row=row, col=1)
        name_lines(fig, labels)
        fig.update_xaxes(tickformat="+.2~%", nticks=7)
        fig.update_xaxes(title_text="change of accuracy", row=len(layers), col=1)
        return fig.update_layout(margin={"t": HEAD + 56, "b": 52})


@torch.no_grad()
def measure_swaps(subject: Subject, loads: dict[int, Float[np.ndarray, " n_v"]]) -> Swaps:
    """Force each layer's most used values on all tokens, and on those of each role.

    Args:
        subject: swaps are scored on its first rows.
        loads: the share of tokens that choose each value, by layer.
    """
    layers = thin(list(loads), LAYERS)
    n_groups = 1 + len(subject.task.role_names)
    most = min(MOST, max(1, (PASSES // len(layers) - 2) // n_groups))
    passes = sum(2 + min(most, len(loads[layer])) * n_groups for layer in layers)
    seq_len = subject.batch.inputs.shape[1]
    batch = subject.batch[: count_rows(TOKENS, passes * seq_len, fewest=FEWEST_ROWS)]
    rng = np.random.default_rng(subject.seed)
    before = scored(subject.model, batch)
    roles = range(len(subject.task.role_names))
    groups: list[tuple[int | None, Bool[Tensor, "b t"]]] = [
        (None, torch.ones_like(batch.roles, dtype=torch.bool))
    ]
    groups += [(role, there) for role in roles if (there := batch.roles == role).any()]
    found, changes, placebo = [], [], 0.0
    for layer in layers:
        same, _ = score_reassigned(subject, batch, layer, torch.clone)
        placebo = max(placebo, float((same.hidden - before.hidden).abs().max()))
        swaps: list[tuple[int | None, int | None, Reassign]] = [
            (None, None, shuffle_choices(subject.seed))
        ]
        for value in np.argsort(-loads[layer], kind="stable")[:most].tolist():
            swaps += [(value, role, force_value(value, there)) for role, there in groups]
        for value, role, reassign in swaps:
            after, moved = score_reassigned(subject, batch, layer, reassign)
            sums, counts = sum_by_row(before, after.right.double() - before.right.double())
            change = estimate_ratio(sums, counts, 0.0, rng)
            found.append(Swap(layer, value, role, moved, change, math.nan))
            changes.append(sums.cpu().numpy())
    ps = westfall_young(np.stack(changes, 1), rng).tolist()
    return Swaps(
        accuracy=estimate_accuracy(before, subject.task.chance, rng),
        swaps=tuple(replace(swap, p=p) for swap, p in zip(found, ps, strict=True)),
        placebo=placebo,
        role_names=subject.task.role_names,
        forced=most,
        left_out=len(loads) > len(layers) or max(map(len, loads.values())) > most,
    )

"""Which experts matter? Answers without the most loaded ones, beside twins; without all of them."""

import html
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from analysis.base import Subject, Words
from analysis.experts import holders as expert_holders
from analysis.experts.answers_held import SHORTLIST, Answers, answers_held
from analysis.experts.deletion import retrieving, sites
from analysis.experts.effects import Change, Deletion, LayerKnockout, Roles, layer_knockout
from analysis.plots import style
from analysis.statistics.estimates import thin
from analysis.words import percent
from tasks.base import count_rows

TITLE = "Experts knocked out"
TOKENS = 4096
"""Tokens that are run again for each deletion, at most, fewest rows apart."""
FEWEST_ROWS = 4
PLANS = ((6, 8, 1.0), (6, 4, 1.0), (6, 3, 0.5), (4, 3, 0.25), (2, 3, 0.25), (2, 2, 0.25))
"""Layers, experts of each kind and share of the rows that may be tried; the first that is cheap
enough is taken."""
WORK = 4e8
"""What is cheap enough: tokens × (`seq_len` + 1024) × blocks that run again, over all deletions."""
MOST_ANSWERS, FEWEST_ANSWERS = 256, 16
"""Answers whose experts are looked for."""
SLIGHT = 0.01
"""Change of loss that is next to nothing, nats: the right answers' probability changes by 1 %."""
FEW = 10
"""Rows below which intervals are not to be trusted."""
FAR = 4
"""How many times the reach of single experts the axis still stretches for all of them."""
LOOKS = {
    "most loaded": {"color": style.BLUE, "symbol": "circle", "size": 9},
    "twins, chosen as often": {
        "color": style.VERMILLION,
        "symbol": "diamond-open",
        "size": 9,
        "line": {"width": 2},
    },
}
ROLE_LOOKS = {
    "all experts": ({"color": style.GREEN, "symbol": "square", "size": 9}, True, -0.14),
    "the most loaded": ({"color": style.BLUE, "symbol": "circle", "size": 8}, False, 0.14),
}


class Plan(NamedTuple):
    """What is tried: which blocks, how many experts of each kind, on how many rows."""

    layers: tuple[int, ...]
    n_experts: int
    rows: int


def measure(subject: Subject) -> list[LayerKnockout | Roles | Answers]:
    """Return each layer's knock-outs, then those by role in all layers, if there are several.

    Last, which expert holds which answer, in the layer whose experts matter most.

    Raises:
        NotApplicableError: for a model without product-key experts.
    """
    plan = planned(subject)
    found = sites(subject.model, subject.batch[: plan.rows], plan.layers)
    rng = np.random.default_rng(subject.seed)
    names = subject.task.role_names
    layers = tuple(layer_knockout(site, names, rng, plan.n_experts) for site in found)
    most = max(layers, key=lambda found: found.everything.loss)
    rows = subject.batch[: plan.rows]
    held = answers_held(subject.model, rows, most.layer, rng, affordable(subject, most.layer))
    by_role = [Roles(layers)] if (rows.roles != rows.roles[0, 0]).any() else []
    return [*layers, *by_role, held]


def affordable(subject: Subject, layer: int) -> int:
    """Return how many answers of a layer are looked at: each is a rerun for every one tried."""
    seq_len, again = subject.task.seq_len, len(subject.model.blocks) - 1 - layer
    each = SHORTLIST * seq_len * (seq_len + 1024) * max(again, 1)
    return int(min(MOST_ANSWERS, max(FEWEST_ANSWERS, WORK // each)))


def planned(subject: Subject) -> Plan:
    """Return the first of `PLANS` that is cheap enough, or else the last, for this model and rows.

    Raises:
        NotApplicableError: for a model without product-key experts.
    """
    blocks, seq_len = len(subject.model.blocks), subject.task.seq_len
    layers = list(retrieving(subject.model))
    full = count_rows(TOKENS, seq_len, fewest=FEWEST_ROWS, most=len(subject.batch.inputs))
    plans = []
    for most_layers, n_experts, share in PLANS:
        tried = tuple(thin(layers, most_layers))
        rows = min(full, max(FEWEST_ROWS, round(share * full)))
        runs = 2 * n_experts + 1 + 2 * len(subject.task.role_names)
        again = sum(blocks - 1 - layer for layer in tried)
        plan = Plan(tried, n_experts, rows)
        if rows * seq_len * (seq_len + 1024) * again * runs <= WORK:
            return plan
        plans.append(plan)
    return plans[-1]


def describe(result: LayerKnockout | Roles | Answers) -> Words:
    """Put knock-outs in words."""
    if isinstance(result, Answers):
        return expert_holders.describe(result)
    return _layer_words(result) if isinstance(result, LayerKnockout) else _role_words(result)


def _layer_words(found: LayerKnockout) -> Words:
    loaded, twins = ([d for d in found.deletions if d.twin is twin] for twin in (False, True))
    title = f"Layer {found.layer} · {found.kind} · loss without one expert"
    low, high = found.everything.loss_interval
    if _slight(found.everything):
        says = "The layer's experts hardly matter to the answers"
    elif low > 0:
        says = "The layer's experts lower the loss"
    elif high < 0:
        says = "The layer's experts raise the loss"
    else:
        says = "No effect of the layer's experts shows"
    says += (
        f": deleting all {found.n_experts:,} {_told(found.everything)}. {_single(loaded, twins)}."
    )
    others = [
        f"over answers at {html.escape(role)} tokens {_told(change)}"
        for role, change in found.by_answer.items()
        if len(found.by_answer) > 1
    ]
    unused = (
        "every expert is used"
        if not found.unused
        else (
            f"{found.unused:,} experts are used by no token: set to zero they change the layer's "
            f"output by {found.unused_change:.2g} at most, as they must"
        )
    )
    reading = (
        f"Every dot is the model run again with w_e = 0 for one expert e, {found.rows} rows, "
        f"{found.scored:,} answers, loss {found.loss:.3g} nats and accuracy "
        f"{percent(found.accuracy)} with all experts; whiskers are 95 % bootstrap intervals over "
        f"rows. Most loaded is by Σ |w_e|. Twins are placebos, used experts drawn to be chosen "
        f"about as often; the band is their range. {unused.capitalize()}."
    )
    if found.rows < FEW:
        reading += f" {found.rows} rows make the intervals narrower than they should be."
    if others:
        reading += f" All experts deleted: {'; '.join(others)}."
    alt = f"Dots of the change of loss, one an expert, the most harmful on top. {says}"
    return Words(title, says, reading, alt)


def _single(loaded: list[Deletion], twins: list[Deletion]) -> str:
    """Say whether one expert stands out of its twins."""
    worst, highest = loaded[0], twins[0].change.loss if twins else None
    effect = f"deleting expert {worst.place} alone {_rise(worst.change)}"
    if highest is None:
        return f"Of the {len(loaded)} experts in use the worst is this: {effect}; no twin is left"
    beside = f"its {len(twins)} twins at most {_signed(highest)}"
    if _matters(worst.change) and worst.change.loss > highest:
        return f"One expert of the {len(loaded)} most loaded stands out: {effect}, {beside}"
    return f"No single expert of the {len(loaded)} most loaded stands out: {effect}, {beside}"


def _matters(change: Change) -> bool:
    """Whether a deletion costs anything worth the name, and surely costs."""
    return change.loss_interval[0] > 0 and change.loss >= SLIGHT


def _slight(change: Change) -> bool:
    """Whether a deletion surely changes next to nothing, either way."""
    low, high = change.loss_interval
    return low >= -SLIGHT and high <= SLIGHT


def _told(change: Change) -> str:
    """Say what became of loss and accuracy."""
    low, high = (100 * end for end in change.accuracy_interval)
    points = f"{100 * change.accuracy:+.1f} [{low:+.1f}, {high:+.1f}] points"
    return f"{_rise(change)} and the accuracy by {points}"


def _rise(change: Change) -> str:
    low, high = change.loss_interval
    return f"changes the loss by {_signed(change.loss)} [{_signed(low)}, {_signed(high)}] nats"


def _signed(value: float) -> str:
    """Return a change of loss with as many digits as it has."""
    return f"{value:+.2f}" if abs(value) >= 0.1 else f"{value:+.2g}"


def _role_words(found: Roles) -> Words:
    title = "Loss without experts at the tokens of one role"
    entries = [(layer, entry) for layer in found.layers for entry in layer.by_role]
    layer, worst = max(entries, key=lambda pair: pair[1].everything.loss)
    where = f"{html.escape(worst.role)} tokens in layer {layer.layer}"
    effect = f"deleting all of them there alone {_told(worst.everything)}"
    if _matters(worst.everything):
        says = f"Experts are needed most at {where}: {effect}."
    elif all(_slight(entry.everything) for _, entry in entries):
        says = f"At no role's tokens do experts matter: it costs most at {where}, where {effect}."
    else:
        says = f"No need of experts shows at any role's tokens: at {where}, the worst, {effect}."
    reading = (
        "An expert is deleted where tokens of one role use it, and kept elsewhere; the change is "
        "over all answers, also those at other tokens. Whiskers are 95 % bootstrap intervals over "
        "rows. All experts of the layer are the most that single ones can come to together; the "
        "other mark is its most loaded one. Layers tried: "
        f"{', '.join(str(entry.layer) for entry in found.layers)}."
    )
    alt = f"Dots of the change of loss by layer and role. {says}"
    return Words(title, says, reading, alt)


def draw(result: LayerKnockout | Roles | Answers) -> go.Figure:
    """Draw the change of loss, an expert a line, or a role a line, or an answer a dot."""
    if isinstance(result, Answers):
        return expert_holders.draw(result)
    return _draw_layer(result) if isinstance(result, LayerKnockout) else _draw_roles(result)


def _draw_layer(found: LayerKnockout) -> go.Figure:
    names = [str(deletion.place) for deletion in found.deletions]
    everything = f"all {found.n_experts:,}"
    fig = style.new_figure(84 + 22 * (len(names) + 1) + 52)
    twins = [d.change.loss for d in found.deletions if d.twin]
    if twins:
        fig.add_vrect(
            min(twins), max(twins), fillcolor=style.MUTED, opacity=0.3, line_width=0, layer="below"
        )
    fig.add_vline(0, line={"color": style.MUTED, "width": 1}, layer="below")
    for (name, look), twin in zip(LOOKS.items(), (False, True), strict=True):
        chosen = [i for i, deletion in enumerate(found.deletions) if deletion.twin is twin]
        deleted = [found.deletions[i] for i in chosen]
        notes = [f"{percent(d.choices)} of choices, {percent(d.load)} of Σ|w|" for d in deleted]
        _dots(
            fig,
            [names[i] for i in chosen],
            [d.change for d in deleted],
            {"name": name, "marker": look, "customdata": notes},
        )
    ends = [end for d in found.deletions for end in (*d.change.loss_interval, d.change.loss)]
    reach = 1.08 * float(np.nanmax(np.abs(ends))) or 1.0
    low, high = found.everything.loss_interval
    if np.nanmax(np.abs([low, high, found.everything.loss])) <= FAR * reach:
        whole = {"color": style.GREEN, "symbol": "square", "size": 9}
        look = {"name": "all experts", "marker": whole, "customdata": ["the whole layer"]}
        _dots(fig, [everything], [found.everything], look)
    else:
        right = found.everything.loss > 0
        fig.update_xaxes(range=[-reach, reach])
        fig.add_annotation(
            text=f"{_signed(found.everything.loss)} →"
            if right
            else f"← {_signed(found.everything.loss)}",
            x=1 if right else 0,
            xref="x domain",
            xanchor="right" if right else "left",
            y=everything,
        )
    fig.update_yaxes(
        categoryorder="array",
        categoryarray=[*names[::-1], everything],
        range=[-0.6, len(names) + 0.6],
        title_text="expert (row, column)",
        showgrid=False,
        automargin="left",
    )
    fig.update_xaxes(title_text="change of loss when deleted, nats", tickformat="~g")
    return fig.update_layout(margin_t=84)


def _draw_roles(found: Roles) -> go.Figure:
    lines = [(layer, entry) for layer in found.layers for entry in layer.by_role]
    names = [f"layer {layer.layer} · {html.escape(entry.role)}" for layer, entry in lines]
    fig = style.new_figure(84 + 30 * len(lines) + 52)
    fig.add_vline(0, line={"color": style.MUTED, "width": 1}, layer="below")
    for name, (look, everything, shift) in ROLE_LOOKS.items():
        changes = [entry.everything if everything else entry.one for _, entry in lines]
        notes = [
            f"{label}, {entry.tokens:,} tokens"
            for label, (_, entry) in zip(names, lines, strict=True)
        ]
        _dots(
            fig,
            [i + shift for i in range(len(lines))],
            changes,
            {"name": name, "marker": look, "customdata": notes},
        )
    fig.update_yaxes(
        tickvals=list(range(len(lines))),
        ticktext=names,
        range=[len(lines) - 0.4, -0.6],
        showgrid=False,
        automargin="left",
    )
    fig.update_xaxes(title_text="change of loss over all answers, nats", tickformat="~g")
    return fig.update_layout(margin_t=84)


def _dots(
    fig: go.Figure, y: Sequence[str | float], changes: Sequence[Change], look: dict[str, Any]
) -> None:
    """Add a dot with a whisker for each change."""
    loss = np.array([change.loss for change in changes])
    ends = np.array([change.loss_interval for change in changes]).reshape(-1, 2)
    fig.add_scatter(
        x=loss,
        y=y,
        mode="markers",
        error_x={
            "type": "data",
            "symmetric": False,
            "array": np.nan_to_num(ends[:, 1] - loss),
            "arrayminus": np.nan_to_num(loss - ends[:, 0]),
            "thickness": 1.3,
            "width": 3,
        },
        hovertemplate="%{customdata}: %{x:+.3g} nats<extra></extra>",
        **look,
    )

"""Which experts are used? Load by rank, and how far every layer is from random choice."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Bool, Float, Int

from analysis.base import Subject, Words
from analysis.experts.choices import chosen_experts
from analysis.experts.evenness import STANDING, Load, load
from analysis.plots.style import BLUE, GREEN, MUTED, PURPLE, VERMILLION, new_figure
from analysis.statistics.estimates import thin
from analysis.words import percent

TITLE = "Which experts are used"
FACES = (
    (BLUE, "circle"),
    (VERMILLION, "square"),
    (GREEN, "diamond"),
    (PURPLE, "triangle-up"),
)
"""Colours that stand out on light and on dark, with the symbols that go with them."""
LINES = 6
"""Lines of a share: with more layers they move together."""


class Face(NamedTuple):
    """How a layer looks among others."""

    color: str
    symbol: str | None


@dataclass(frozen=True)
class Loads:
    """The load of every layer's experts, by rank.

    Attributes:
        layers: those that choose among experts.
    """

    layers: tuple[Load, ...]


@dataclass(frozen=True)
class Comparison:
    """A few shares of every layer, each beside what uniform random choice makes it.

    Attributes:
        names: of the shares.
        layers: index of each layer's block.
        shares: in [0, 1]; NaN where a layer has no such share.
        uniform: the same under random choice.
        stands_out: whether standing experts hold more of a layer than random choice gives them.
        margins: median margin between the k-th and the next score, in standard deviations of all
            experts' scores; NaN where k is all experts.
    """

    names: tuple[str, ...]
    layers: Int[np.ndarray, " layers"]
    shares: Float[np.ndarray, "names layers"]
    uniform: Float[np.ndarray, "names layers"]
    stands_out: Bool[np.ndarray, " layers"]
    margins: Float[np.ndarray, " layers"]


def measure(subject: Subject) -> list[Loads | Comparison]:
    """Return the loads of every layer that chooses among experts, and a few shares of each.

    Raises:
        NotApplicableError: for a model without experts.
    """
    chosen = chosen_experts(subject.model, subject.batch)
    loads = tuple(load(layer, subject.seed) for layer in chosen)
    return [Loads(loads), comparison(loads)]


def comparison(loads: Sequence[Load]) -> Comparison:
    """Return the shares that a load has beside those of random choice."""
    rows = {
        "experts used": [(one.choices.used, one.uniform.used) for one in loads],
        "load on a token's worth of experts": [(one.choices.top, one.uniform.top) for one in loads],
        "load on standing experts": [(one.standing_share, one.standing_uniform) for one in loads],
        "choices repeated by another head": [(one.twice, one.twice_uniform) for one in loads],
        "overlap of two heads": [(one.overlap, one.overlap_uniform) for one in loads],
        "choices decided by a tie": [(one.tied, 0.0) for one in loads],
    }
    table = np.array(list(rows.values()), dtype=np.float64)
    return Comparison(
        names=tuple(rows),
        layers=np.array([one.layer for one in loads]),
        shares=table[..., 0],
        uniform=table[..., 1],
        stands_out=np.array([one.stands_out for one in loads]),
        margins=np.array([one.margin for one in loads]),
    )


def faces(layers: Sequence[int]) -> dict[int, Face]:
    """Return how each layer looks: four or fewer stand out, of many the rest are thin and grey."""
    chosen = set(thin(layers, len(FACES)))
    looks = iter(FACES)
    return {layer: Face(*next(looks)) if layer in chosen else Face(MUTED, None) for layer in layers}


def describe(result: Loads | Comparison) -> Words:
    """Put a result in words."""
    return _of_loads(result) if isinstance(result, Loads) else _of_comparison(result)


def _of_loads(result: Loads) -> Words:
    loads = result.layers
    worst, best = (f(loads, key=lambda one: one.evenness) for f in (min, max))
    says = (
        f"Layer {worst.layer} uses its {worst.n_experts:,} experts as evenly as "
        f"{number(worst.choices.effective)} equal ones (random choice: "
        f"{number(worst.uniform.effective)}): {percent(worst.choices.used)} are chosen at all "
        f"({percent(worst.uniform.used)}), and {worst.choices.covering[1]:,.0f} hold 90 % of the "
        f"choices ({number(worst.uniform.covering[1])})"
    )
    if best is not worst:
        says += (
            f"; the most even of {len(loads)} layers, layer {best.layer}, counts as "
            f"{number(best.choices.effective)} of {best.n_experts:,}"
        )
    collapsed = [one for one in loads if one.collapsed]
    if collapsed:
        first = collapsed[0]
        says = (
            f"Collapsed: in {_named([one.layer for one in collapsed])} nearly every token takes "
            f"the same experts ({first.standing} of them hold {percent(first.standing_share)} of "
            f"layer {first.layer}'s choices). {says}"
        )
    reading = (
        "Each layer's experts in order of load; 1 is the mean of all its experts, and a curve ends "
        "where experts begin that no token chose. Solid: choices, all alike. Dotted: weighted by "
        "|w|, what each expert's output is multiplied by. Grey band: uniform random choice of k "
        "distinct experts a head and token, 95 %."
    )
    alt = "Lines of load by rank: " + "; ".join(
        f"layer {one.layer}, effective {number(one.choices.effective)} of {one.n_experts:,}, "
        f"Gini {one.choices.gini:.2f} (random {one.uniform.gini:.2f})"
        for one in loads
    )
    return Words("Load of the experts by rank, over all tokens", says + ".", reading, alt + ".")


def _of_comparison(result: Comparison) -> Words:
    known = {name: i for i, name in enumerate(result.names)}
    standing, tied, overlap = (
        result.shares[known[name]]
        for name in (
            "load on standing experts",
            "choices decided by a tie",
            "overlap of two heads",
        )
    )
    parts = []
    if standing.max() > 0:
        by_chance = result.uniform[known["load on standing experts"]]
        layer = int((standing - by_chance + result.stands_out).argmax())
        held = (
            f"{percent(standing[layer])} of layer {result.layers[layer]}'s choices (random choice: "
            f"{percent(by_chance[layer])})"
        )
        who = f"standing experts, each chosen by at least {round(100 * STANDING)} % of the tokens, "
        if result.stands_out[layer]:
            parts.append(f"{who}hold {held}")
        else:
            parts.append(f"{who}hold no more than by chance, {held}")
    else:
        parts.append("no layer has standing experts")
    if not np.isnan(overlap).all():
        layer = int(np.nanargmax(overlap))
        by_chance = result.uniform[known["overlap of two heads"], layer]
        parts.append(
            f"two heads of layer {result.layers[layer]} have {percent(overlap[layer])} of their "
            f"experts in common (independent heads: {percent(by_chance)})"
        )
    layer = int(tied.argmax())
    decided = f"{percent(tied[layer])} of layer {result.layers[layer]}'s" if tied[layer] else "no"
    parts.append(f"a tie decides {decided} choices")
    says = "; ".join(parts) + "."
    if not np.isnan(result.margins).all():
        layer = int(np.nanargmin(result.margins))
        says += (
            f" The last expert chosen leads the next by {result.margins[layer]:.2g} standard "
            f"deviations of the scores (median, layer {result.layers[layer]})."
        )
    reading = (
        "Filled: measured. Hollow: uniform random choice, each head for itself. A token's worth is "
        "as many experts as one token chooses, those with most load. Standing experts are chosen "
        f"by at least {round(100 * STANDING)} % of the tokens. Overlap is |A ∩ B| / |A ∪ B|. A tie "
        "is a k-th score equal to the next but for rounding: order of storage decides."
    )
    alt = "Dots of shares beside those of random choice: " + "; ".join(
        f"{name} {_listed(result.shares[i])} ({_listed(result.uniform[i])})"
        for name, i in known.items()
        if not np.isnan(result.shares[i]).all()
    )
    title = "How far the choice of experts is from random, layer by layer"
    return Words(title, says[0].upper() + says[1:], reading, alt + ".")


def draw(result: Loads | Comparison) -> go.Figure:
    """Draw a result."""
    return _ranked(result) if isinstance(result, Loads) else _dots(result)


def _ranked(result: Loads) -> go.Figure:
    """Draw load by rank on logarithmic axes, over the band of random choice."""
    fig = new_figure(height=420)
    looks = faces([one.layer for one in result.layers])
    seen: list[float] = []
    bands = {}
    for one in result.layers:
        bands.setdefault((one.n_experts, one.n_heads, one.k, one.tokens), one.ranked)
    for band in bands.values():
        inside = band.high > 0
        low = np.maximum(band.low[inside], band.high[inside] * 1e-3)
        ranks = band.ranks[inside]
        seen += [float(band.low[band.low > 0].min(initial=1.0)), float(band.high.max())]
        fig.add_scatter(
            x=np.concatenate([ranks, ranks[::-1]]),
            y=np.concatenate([band.high[inside], low[::-1]]).astype(np.float32),
            fill="toself",
            mode="lines",
            line={"color": MUTED, "width": 1},
            fillcolor="rgba(128,134,145,0.35)",
            name="random choice",
            legendgroup="random choice",
            showlegend=band is next(iter(bands.values())),
            hoverinfo="skip",
        )
    for one in result.layers:
        face, ranked = looks[one.layer], one.ranked
        for values, dash in ((ranked.choices, "solid"), (ranked.weighted, "dot")):
            if face.symbol is None and dash == "dot":
                continue
            used = values > 0
            seen += values[used].tolist()
            solid = dash == "solid"
            fig.add_scatter(
                x=ranked.ranks[used],
                y=values[used].astype(np.float32),
                mode="lines+markers" if solid and face.symbol else "lines",
                line={"color": face.color, "width": 2 if face.symbol else 1, "dash": dash},
                marker={"symbol": face.symbol, "size": 7, "maxdisplayed": 8},
                opacity=1 if face.symbol else 0.6,
                name=f"layer {one.layer}" if solid else "by |w|",
                legendgroup=f"layer {one.layer}" if solid else "by |w|",
                showlegend=solid and face.symbol is not None,
                hovertemplate=f"layer {one.layer}, rank %{{x:,}}: %{{y:.3g}} × mean<extra></extra>",
            )
    # One entry for all dotted lines, in no layer's colour.
    fig.add_scatter(
        x=[None],
        y=[None],
        mode="lines",
        line={"color": MUTED, "width": 2, "dash": "dot"},
        name="by |w|",
        legendgroup="by |w|",
    )
    most = max(one.n_experts for one in result.layers)
    low, high = np.log10([min(seen), max(seen)])
    fig.update_xaxes(
        type="log",
        range=[-0.03, math.log10(most) + 0.03],
        dtick=1 if most > 50 else "D2",
        tickformat=",",
        title_text="rank of the expert by load",
    )
    fig.update_yaxes(
        type="log",
        range=[max(low, -3) - 0.1, high + 0.1],
        tickformat="~g",
        dtick="D2" if high - max(low, -3) < 1.5 else 1,
        title_text="load, multiples of the mean",
    )
    return fig.update_layout(margin_t=104 if len(result.layers) > 2 else 84)


def _dots(result: Comparison) -> go.Figure:
    """Draw dots, a row a share and layer, filled where measured and hollow by chance."""
    kept = [i for i in range(len(result.names)) if not np.isnan(result.shares[i]).all()]
    layers = result.layers.tolist()
    # Many layers share the height of a few, and only the first and the last are labelled.
    pitch = min(1.0, LINES / len(layers))
    y, ticks, labels, headings, at = [], [], [], [], 0.0
    for i in kept:
        headings.append((at, result.names[i]))
        at += 1
        places = [at + pitch * place for place in range(len(layers))]
        y += places
        ends = places if pitch == 1 else [places[0], places[-1]]
        ticks += ends
        labels += [
            f"layer {layer}" for layer in (layers if pitch == 1 else [layers[0], layers[-1]])
        ]
        at = places[-1] + 1.4
    fig = new_figure(height=round(44 + 40 + 18 * at + 48))
    shares, uniform = (x[kept].ravel() for x in (result.shares, result.uniform))
    lines_x = [x for pair in zip(shares, uniform, strict=True) for x in (*pair, None)]
    lines_y = [x for place in y for x in (place, place, None)]
    fig.add_scatter(
        x=lines_x,
        y=lines_y,
        mode="lines",
        line={"color": MUTED, "width": 1.5},
        showlegend=False,
        hoverinfo="skip",
    )
    for values, name, symbol in (
        (uniform, "random choice", "circle-open"),
        (shares, "measured", "circle"),
    ):
        fig.add_scatter(
            x=values,
            y=y,
            mode="markers",
            name=name,
            marker={
                "symbol": symbol,
                "size": 9 if pitch == 1 else 6,
                "color": MUTED if symbol.endswith("open") else BLUE,
            },
            cliponaxis=False,
            text=[f"layer {layer}" for layer in layers] * len(kept),
            hovertemplate=f"%{{text}}, {name}: %{{x:.2%}}<extra></extra>",
        )
    for place, name in headings:
        fig.add_annotation(
            text=f"<b>{name}</b>", x=0, y=place, xref="x", xanchor="left", yanchor="middle"
        )
    fig.update_xaxes(
        range=[-0.02, 1.02], tickformat=".0%", title_text="share", tickvals=[0, 0.25, 0.5, 0.75, 1]
    )
    fig.update_yaxes(
        range=[at - 0.4, -0.6],
        tickvals=ticks,
        ticktext=labels,
        showgrid=False,
        ticks="",
        showline=False,
    )
    return fig.update_layout(margin={"t": 84, "l": 64})


def number(count: float) -> str:
    """Return an effective number as text: a decimal below ten."""
    return f"{count:,.1f}" if count < 9.95 and count != round(count) else f"{count:,.0f}"


def _named(layers: Sequence[int]) -> str:
    """Return "layer 3", "layers 0 and 1", "layers 0, 1 and 3"."""
    names = [str(layer) for layer in layers]
    if len(names) == 1:
        return f"layer {names[0]}"
    return f"layers {', '.join(names[:-1])} and {names[-1]}"


def _listed(shares: Float[np.ndarray, " layers"]) -> str:
    return ", ".join("–" if math.isnan(share) else percent(float(share)) for share in shares)

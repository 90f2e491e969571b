"""Which experts serve which role? What one choice of an expert tells about the token's role."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from analysis.base import NotApplicableError, Subject, Words
from analysis.experts.choices import Chosen, chosen_experts
from analysis.plots.style import new_figure
from analysis.record import figure_only
from analysis.statistics import distributions
from analysis.words import percent

TITLE = "Which experts serve which role"
DRAWS = 2**17
"""Choices of a layer that are looked at, at most; of more, those of a sample of tokens."""
ROUNDS = 99
"""Shuffles of the roles: the least p-value is then 0.01."""
BARS = 24
"""Experts that are shown, of all layers together, about."""
LEAST, MOST = 3, 8
"""Experts of a layer that are shown."""
PATTERNS = ("", "/", "x", ".", "\\", "+", "-", "|")
"""Hatchings of the roles, so that colour never stands alone."""


@dataclass(frozen=True)
class Preference:
    """What a layer's choices tell about roles; information in nats.

    Attributes:
        layer: index of the block.
        kind: its class.
        information: I(expert; role) of one of a token's choices, plug-in, ≥ 0.
        corrected: the same after Miller and Madow, as if choices were independent.
        shuffled: mean of the plug-in value under shuffled roles.
        null: the plug-in value under shuffled roles, one a shuffle; the same in all layers.
        experts: those that tell most, first to last.
        told: p(e) KL(p(role | e) ‖ p(role)) of each, nats; over all experts they add up to
            `information`.
        load: p(e), the share of the choices.
        shares: p(role | e), in the order of the task's roles.
    """

    layer: int
    kind: str
    information: float
    corrected: float
    shuffled: float
    experts: Int[np.ndarray, " e"]
    told: Float[np.ndarray, " e"]
    load: Float[np.ndarray, " e"]
    shares: Float[np.ndarray, "e roles"] = figure_only()
    null: Float[np.ndarray, " rounds"] = figure_only()

    @property
    def beyond(self) -> Float[np.ndarray, " rounds"]:
        """How far `information`, and then each shuffle's, is above the mean of them all, nats.

        Layers differ in what bias makes of no information at all: this can be compared.
        """
        every = np.array([self.information, *self.null])
        return every - every.mean()


@dataclass(frozen=True)
class Preferences:
    """What the choices of all layers tell about roles.

    Attributes:
        role_names: the task's.
        roles: share of the tokens of each role.
        uncertainty: H(role), nats: the most that can be told.
        p_value: of the layer that tells most, ≥ 0.01: how often the layer that tells most under
            shuffled roles, whichever it is, is as far beyond.
        layers: one entry a layer that chooses among experts.
    """

    role_names: tuple[str, ...]
    roles: Float[np.ndarray, " roles"]
    uncertainty: float
    p_value: float
    layers: tuple[Preference, ...]


def measure(subject: Subject) -> list[Preferences]:
    """Return what each layer's choices tell about the tokens' roles.

    Raises:
        NotApplicableError: for a model without experts, or rows of a single role.
    """
    roles = subject.batch.roles.flatten().cpu().numpy()
    names = subject.task.role_names
    layers = chosen_experts(subject.model, subject.batch)
    if len(np.unique(roles)) < 2:
        raise NotApplicableError("all tokens have the same role")
    return [preferences(layers, roles, names, subject.seed)]


def preferences(
    layers: Sequence[Chosen], roles: Int[np.ndarray, " n"], names: tuple[str, ...], seed: int
) -> Preferences:
    """Return what the choices of all layers tell about roles.

    Args:
        layers: the choices.
        roles: of the tokens.
        names: of the roles.
        seed: of the shuffles, and of the sample of tokens; both are the same in all layers.
    """
    shown = min(MOST, max(LEAST, BARS // len(layers)))
    most = max(1, DRAWS // max(chosen.indices[0].size for chosen in layers))
    tokens = np.arange(len(roles))
    if len(roles) > most:
        tokens = np.random.default_rng(seed).choice(len(roles), most, replace=False)
    found = tuple(preference(chosen, roles, len(names), shown, seed, tokens) for chosen in layers)
    first = np.max([one.beyond for one in found], axis=0)
    counts = np.bincount(roles, minlength=len(names))
    return Preferences(
        role_names=names,
        roles=distributions.shares(counts),
        uncertainty=float(distributions.entropy(counts)),
        # What differs by the order of summation alone counts as reached.
        p_value=float((first >= first[0] - 1e-12).mean()),
        layers=found,
    )


def preference(
    chosen: Chosen,
    roles: Int[np.ndarray, " n"],
    n_roles: int,
    shown: int,
    seed: int,
    tokens: Int[np.ndarray, " m"] | None = None,
) -> Preference:
    """Return what a layer's choices tell about roles.

    Args:
        chosen: the choices.
        roles: of the tokens.
        n_roles: that there are.
        shown: how many of the experts that tell most to name.
        seed: of the shuffles.
        tokens: those that are looked at; None: all.
    """
    looked_at = slice(None) if tokens is None else tokens
    roles = roles[looked_at]
    rng = np.random.default_rng(seed)
    experts = chosen.indices[looked_at].reshape(len(roles), -1).astype(np.int64)
    # Numbering only the experts that were chosen keeps the table small.
    known, experts = np.unique(experts, return_inverse=True)
    experts = experts.reshape(len(roles), -1)
    counts = distributions.joint_counts(experts, roles)
    counts = np.pad(counts, ((0, 0), (0, n_roles - counts.shape[1])))
    information = distributions.mutual_information(counts)
    shuffled = distributions.permutation_null(experts, roles, rng, ROUNDS)
    load, shares = distributions.shares(counts.sum(1)), distributions.shares(counts)
    overall = distributions.shares(counts.sum(0))
    ratio = np.divide(shares, overall, out=np.ones_like(shares), where=shares > 0)
    told = load * (shares * np.log(ratio)).sum(1)
    first = np.argsort(-told, kind="stable")[:shown]
    return Preference(
        layer=chosen.layer,
        kind=chosen.kind,
        information=information,
        corrected=distributions.miller_madow(counts),
        shuffled=float(shuffled.mean()),
        experts=known[first].astype(np.int64),
        told=told[first],
        load=load[first],
        shares=shares[first],
        null=shuffled,
    )


def describe(result: Preferences) -> Words:
    """Put what choices tell about roles in words."""
    best = max(result.layers, key=lambda one: float(one.beyond[0]))
    amount = (
        f"{_nats(best.information)} of {result.uncertainty:.2f} nats (shuffled roles: "
        f"{_nats(best.shuffled)}, p {'≤' if result.p_value <= 0.01 else '='} "
        f"{result.p_value:.2f}{' over all layers' if len(result.layers) > 1 else ''})"
    )
    if result.p_value > 0.05:
        says = (
            "No layer's choice of experts tells the role of a token beyond chance; "
            f"layer {best.layer} comes nearest with {amount}."
        )
    else:
        role = int(best.shares[0].argmax())
        says = (
            f"One choice of an expert in layer {best.layer} tells {amount} of a token's role; "
            f"the expert that tells most, {best.experts[0]}, makes {percent(best.shares[0, role])} "
            f"of its choices at “{result.role_names[role]}” tokens, which are "
            f"{percent(result.roles[role])} of all."
        )
    reading = (
        "Bars: the roles of the tokens that choose an expert; the top bar is all tokens, and an "
        "expert that served every role alike would look like it. Of each layer, the experts that "
        "add most to I(expert; role), and their share of the layer's choices. Roles with tokens of "
        "their own are told apart by untrained layers too: compare with step 0."
    )
    alt = "Stacked bars of roles by expert. I(expert; role), nats, shuffled in brackets: "
    alt += ", ".join(
        f"layer {one.layer} {one.information:.3f} ({one.shuffled:.3f})" for one in result.layers
    )
    title = "Roles of the tokens that choose an expert, for the experts that tell most"
    return Words(title, says, reading, alt + ".")


def draw(result: Preferences) -> go.Figure:
    """Draw stacked bars of roles, all tokens on top, then the experts that tell most."""
    # Of many layers those that tell most, in their order.
    by_told = sorted(result.layers, key=lambda one: -one.information)[: BARS // LEAST]
    layers = sorted(by_told, key=lambda one: one.layer)
    named = [
        (f"{one.layer} · {expert}", f"layer {one.layer}, expert {expert}: {percent(float(load))}")
        for one in layers
        for expert, load in zip(one.experts.tolist(), one.load, strict=True)
    ]
    labels = ["<b>all tokens</b>", *(label for label, _ in named)]
    hover = ["all tokens", *(f"{text} of the layer's choices" for _, text in named)]
    places, place = [0.0], 0.5
    for one in layers:
        places += [place + 1 + i for i in range(len(one.experts))]
        place = places[-1] + 0.5
    shares = np.concatenate([result.roles[None], *(one.shares for one in layers)])
    chart = new_figure(height=round(96 + 19 * (place + 1) + 48))
    for role, name in enumerate(result.role_names):
        chart.add_bar(
            x=shares[:, role].astype(np.float32),
            y=places,
            orientation="h",
            name=html.escape(name),
            marker={
                "pattern": {
                    "shape": PATTERNS[role % len(PATTERNS)],
                    "fillmode": "overlay",
                    "size": 6,
                    "solidity": 0.2,
                }
            },
            text=hover,
            textposition="none",
            hovertemplate=f"%{{text}}<br>{html.escape(name)}: %{{x:.1%}}<extra></extra>",
        )
    chart.update_xaxes(
        range=[0, 1],
        tickformat=".0%",
        tickvals=[0, 0.25, 0.5, 0.75, 1],
        title_text="share of the choices",
    )
    chart.update_yaxes(
        range=[place, -0.6],
        tickvals=places,
        ticktext=labels,
        showgrid=False,
        showline=False,
        ticks="",
        automargin="left",
        title_text="layer · expert",
    )
    return chart.update_layout(
        barmode="stack",
        bargap=0.25,
        margin={"t": 96, "r": 26},
        legend_traceorder="normal",
    )


def _nats(information: float) -> str:
    """Return information as text: two decimals, of small amounts two digits."""
    return f"{information:.2f}" if information >= 0.1 else f"{information:.2g}"

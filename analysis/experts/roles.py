"""Which experts serve which role? What the choice of an expert reveals about the token's role."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from analysis.base import Finding, NotApplicableError, Subject, Words, describe, draw
from analysis.experts.choices import ExpertChoices, record_choices
from analysis.plain import figure_only
from analysis.plots.lines import name_lines
from analysis.plots.style import new_figure
from analysis.statistics import distributions
from analysis.words import format_nats, percent

__all__ = ["TITLE", "RolePreferences", "describe", "draw", "measure"]

TITLE = "Which experts serve which role"
DRAWS = 2**17
"""Maximum number of choices of a layer that are counted; of more, those of a sample of tokens."""
ROUNDS = 99
"""Shuffles of the roles; the smallest p-value is then 0.01."""
BARS = 24
"""About how many experts are shown, of all layers together."""
LEAST, MOST = 3, 8
"""Minimum and maximum number of experts of a layer that are shown."""
PATTERNS = ("", "/", "x", ".", "\\", "+", "-", "|")
"""Patterns of the bars, so that roles do not differ by colour alone."""


@dataclass(frozen=True)
class LayerPreference:
    """What the choices of one layer reveal about roles; information in nats.

    Attributes:
        layer: index of the block.
        kind: its class.
        information: I(expert; role) of one of a token's choices, plug-in, ≥ 0.
        corrected: the same with the correction of Miller and Madow, for independent choices.
        shuffled: mean of the plug-in value under shuffled roles.
        null: the plug-in value of each shuffle; all layers have the same shuffles.
        experts: those that reveal most, in descending order.
        told: p(e) KL(p(role | e) ‖ p(role)) of each, nats; these add up to `information` over
            all experts.
        load: p(e), its share of the choices.
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
        """How far `information`, then each value of `null`, is above their mean, nats.

        The bias of `information` differs between layers; these differences are comparable.
        """
        every = np.array([self.information, *self.null])
        return every - every.mean()


@dataclass(frozen=True)
class RolePreferences(Finding):
    """What the choices of all layers reveal about roles.

    Attributes:
        role_names: the task's.
        roles: share of the tokens of each role.
        uncertainty: H(role), nats, the largest possible information.
        p_value: of the layer that reveals most, ≥ 0.01: how often any layer is as far beyond its
            mean (`beyond`) under shuffled roles.
        layers: one entry for each layer that chooses among experts.
    """

    role_names: tuple[str, ...]
    roles: Float[np.ndarray, " roles"]
    uncertainty: float
    p_value: float
    layers: tuple[LayerPreference, ...]

    def describe(self) -> Words:
        """Say how much the choices of the best layer reveal about roles, and by which expert."""
        best = max(self.layers, key=lambda one: float(one.beyond[0]))
        amount = (
            f"{format_nats(best.information)} of {self.uncertainty:.2f} nats (shuffled roles: "
            f"{format_nats(best.shuffled)}, p {'≤' if self.p_value <= 0.01 else '='} "
            f"{self.p_value:.2f}{' over all layers' if len(self.layers) > 1 else ''})"
        )
        if self.p_value > 0.05:
            says = (
                "No layer's choice of experts reveals the role of a token beyond chance; "
                f"layer {best.layer} comes nearest with {amount}."
            )
        else:
            # Of most experts the commonest role is the first, whatever they reveal.
            role = int((best.shares[0] - self.roles).argmax())
            share = percent(best.shares[0, role])
            says = (
                f"One choice of an expert in layer {best.layer} reveals {amount} of a token's "
                f"role; the expert that reveals most, {best.experts[0]}, makes {share} of its "
                f"choices at “{self.role_names[role]}” tokens, which are "
                f"{percent(self.roles[role])} of all."
            )
        reading = (
            "Each bar shows the roles of the tokens that choose an expert. The top bar is for all "
            "tokens; an expert that serves all roles alike looks like it. Each layer shows the "
            "experts that add most to I(expert; role). An untrained layer can also tell apart "
            "roles that have tokens of their own, so compare with step 0."
        )
        alt = "Stacked bars of roles by expert. I(expert; role), nats, shuffled in brackets: "
        alt += ", ".join(
            f"layer {one.layer} {one.information:.3f} ({one.shuffled:.3f})" for one in self.layers
        )
        title = "Roles of the tokens that choose an expert, for the experts that reveal most"
        return Words(title, says, reading, alt + ".")

    def draw(self) -> go.Figure:
        """Draw stacked bars of roles: all tokens on top, then the experts that reveal most."""
        # Of many layers, show those that reveal most, in their order.
        by_told = sorted(self.layers, key=lambda one: -one.information)[: BARS // LEAST]
        layers = sorted(by_told, key=lambda one: one.layer)
        named = [
            (
                f"{one.layer} · {expert}",
                f"layer {one.layer}, expert {expert}: {percent(float(load))}",
            )
            for one in layers
            for expert, load in zip(one.experts.tolist(), one.load, strict=True)
        ]
        labels = ["<b>all tokens</b>", *(label for label, _ in named)]
        hover = ["all tokens", *(f"{text} of the layer's choices" for _, text in named)]
        places, place = [0.0], 0.5
        for one in layers:
            places += [place + 1 + i for i in range(len(one.experts))]
            place = places[-1] + 0.5
        shares = np.concatenate([self.roles[None], *(one.shares for one in layers)])
        fig = new_figure(height=round(96 + 19 * (place + 1) + 48))
        for role, name in enumerate(self.role_names):
            fig.add_bar(
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
        fig.update_xaxes(
            range=[0, 1],
            tickformat=".0%",
            tickvals=[0, 0.25, 0.5, 0.75, 1],
            title_text="share of the choices",
        )
        name_lines(fig, labels, places, showline=False, title_text="layer · expert")
        return fig.update_layout(
            barmode="stack",
            bargap=0.25,
            margin={"t": 96, "r": 26},
            legend_traceorder="normal",
        )


def measure(subject: Subject) -> list[RolePreferences]:
    """Measure what each layer's choices reveal about the roles of tokens.

    Raises:
        NotApplicableError: for a model without experts, or rows of a single role.
    """
    roles = subject.batch.roles.flatten().cpu().numpy()
    names = subject.task.role_names
    layers = record_choices(subject.model, subject.batch)
    if len(np.unique(roles)) < 2:
        raise NotApplicableError("all tokens have the same role")
    return [measure_preferences(layers, roles, names, subject.seed)]


def measure_preferences(
    layers: Sequence[ExpertChoices], roles: Int[np.ndarray, " n"], names: tuple[str, ...], seed: int
) -> RolePreferences:
    """Measure what the choices of all layers tell about roles.

    Args:
        layers: the choices.
        roles: of the tokens.
        names: of the roles.
        seed: of the shuffles and of the sample of tokens, which are the same in all layers.
    """
    shown = min(MOST, max(LEAST, BARS // len(layers)))
    most = max(1, DRAWS // max(chosen.indices[0].size for chosen in layers))
    tokens = np.arange(len(roles))
    if len(roles) > most:
        tokens = np.random.default_rng(seed).choice(len(roles), most, replace=False)
    found = tuple(
        measure_layer(chosen, roles, len(names), shown, seed, tokens) for chosen in layers
    )
    first = np.max([one.beyond for one in found], axis=0)
    counts = np.bincount(roles, minlength=len(names))
    return RolePreferences(
        role_names=names,
        roles=distributions.compute_shares(counts),
        uncertainty=float(distributions.entropy(counts)),
        # Differences by the order of summation alone do not count.
        p_value=float((first >= first[0] - 1e-12).mean()),
        layers=found,
    )


def measure_layer(
    chosen: ExpertChoices,
    roles: Int[np.ndarray, " n"],
    n_roles: int,
    shown: int,
    seed: int,
    tokens: Int[np.ndarray, " m"] | None = None,
) -> LayerPreference:
    """Measure what the choices of one layer tell about roles.

    Args:
        chosen: the choices.
        roles: of the tokens.
        n_roles: how many roles there are.
        shown: how many experts to name, those that reveal most.
        seed: of the shuffles.
        tokens: those that are counted; None for all.
    """
    counted = slice(None) if tokens is None else tokens
    roles = roles[counted]
    rng = np.random.default_rng(seed)
    experts = chosen.indices[counted].reshape(len(roles), -1).astype(np.int64)
    # Number only the experts that were chosen, to keep the table small.
    known, experts = np.unique(experts, return_inverse=True)
    experts = experts.reshape(len(roles), -1)
    counts = distributions.count_joint(experts, roles)
    counts = np.pad(counts, ((0, 0), (0, n_roles - counts.shape[1])))
    information = distributions.mutual_information(counts)
    shuffled = distributions.permutation_null(experts, roles, rng, ROUNDS)
    load, shares = distributions.compute_shares(counts.sum(1)), distributions.compute_shares(counts)
    overall = distributions.compute_shares(counts.sum(0))
    ratio = np.divide(shares, overall, out=np.ones_like(shares), where=shares > 0)
    told = load * (shares * np.log(ratio)).sum(1)
    first = np.argsort(-told, kind="stable")[:shown]
    return LayerPreference(
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

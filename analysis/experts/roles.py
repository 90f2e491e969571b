"""Which experts serve which role? What the choice of an expert reveals about the token's role."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from analysis.base import Finding, NotApplicableError, Subject, Table, thin
from analysis.experts.load import TABLED, ExpertChoices, record_choices
from analysis.figures import Axis, Bars, bars
from analysis.plain import figure_only
from analysis.statistics import distributions
from analysis.words import format_nats, percent

__all__ = ["TITLE", "RolePreferences", "measure"]

TITLE = "Which experts serve which role"
DRAWS = 2**17
"""Maximum number of choices of a layer that are counted; of more, those of a sample of tokens."""
ROUNDS = 99
"""Shuffles of the roles; the smallest p-value is then 0.01."""
BARS = 24
"""About how many experts are shown, of all layers together."""
LEAST, MOST = 3, 8
"""Minimum and maximum number of experts of a layer that are shown."""


@dataclass(frozen=True)
class LayerPreference:
    """What the choices of one layer reveal about roles; information in nats.

    Attributes:
        information: I(expert; role) of one of a token's choices, plug-in, ≥ 0.
        shuffled: mean of the plug-in value under shuffled roles.
        experts: those that reveal most, by p(e) KL(p(role | e) ‖ p(role)), in descending order;
            over all experts these add up to `information`.
        load: p(e), each one's share of the choices.
        shares: p(role | e), in the order of the task's roles.
        null: the plug-in value of each shuffle; all layers have the same shuffles.
    """

    layer: int
    information: float
    shuffled: float
    experts: Int[np.ndarray, " e"]
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
        roles: share of the tokens of each role.
        uncertainty: H(role), nats, the largest possible information.
        p_value: of the layer that reveals most, ≥ 0.01: how often any layer is as far beyond its
            mean (`beyond`) under shuffled roles.
    """

    role_names: tuple[str, ...]
    roles: Float[np.ndarray, " roles"]
    uncertainty: float
    p_value: float
    layers: tuple[LayerPreference, ...]

    title = "Roles of the tokens that choose an expert, for the experts that reveal most"
    reading = (
        "Each bar shows the roles of the tokens that choose an expert. The top bar is for all "
        "tokens; an expert that serves all roles alike has the same bar. Each layer shows the "
        "experts that add most to I(expert; role), and the table names the first and the role that "
        "it serves beyond that role's share of all tokens. The p-value compares the best layer "
        "with the best that chance gives. An untrained layer can also tell apart roles that have "
        "tokens of their own, so compare with step 0."
    )

    @property
    def says(self) -> str:
        """How much the choices of the best layer reveal about roles, if beyond chance."""
        best = max(self.layers, key=lambda one: float(one.beyond[0]))
        reveals = "reveals" if self.p_value <= 0.05 else "is not seen to reveal"
        return (
            f"The choice of an expert in layer {best.layer} {reveals} the role of a token: I = "
            f"{format_nats(best.information)} of {self.uncertainty:.2f} nats (shuffled roles: "
            f"{format_nats(best.shuffled)}, p {'≤' if self.p_value <= 0.01 else '='} "
            f"{self.p_value:.2f} for the best of all layers)."
        )

    def numbers(self) -> Table:
        """Return what each layer reveals, and the role that its first expert serves most."""
        rows = []
        for one in thin(self.layers, TABLED):
            # Of most experts the commonest role is the first, whatever they reveal.
            role = int((one.shares[0] - self.roles).argmax())
            serves = f"{percent(one.shares[0, role])} {self.role_names[role]}"
            information = f"{format_nats(one.information)} ({format_nats(one.shuffled)})"
            first = str(one.experts[0]), serves, percent(self.roles[role])
            rows.append((str(one.layer), information, *first))
        columns = "layer", "I, nats (shuffled)", "first expert", "of its choices", "of all tokens"
        return Table(columns, tuple(rows))

    def figure(self) -> go.Figure:
        """Draw stacked bars of roles: all tokens on top, then the experts that reveal most."""
        # Of many layers, show those that reveal most, in their order.
        by_told = sorted(self.layers, key=lambda one: -one.information)[: BARS // LEAST]
        names, notes, shares = ["all tokens"], ["all tokens"], [self.roles]
        for one in sorted(by_told, key=lambda one: one.layer):
            # An empty line separates the layers.
            names += ["", *(f"{one.layer} · {expert}" for expert in one.experts)]
            notes += ["", *(f"{percent(load)} of layer {one.layer}'s choices" for load in one.load)]
            shares += [np.full(len(self.roles), np.nan), *one.shares]
        by_role = zip(self.role_names, np.stack(shares, axis=1), strict=True)
        series = [Bars(name, part, notes=notes) for name, part in by_role]
        axis = Axis("share of the choices", "share")
        return bars(names, series, axis, stacked=True, line=19, title="layer · expert")


def measure(subject: Subject) -> list[RolePreferences]:
    """Measure what each layer's choices reveal about the roles of tokens.

    Raises:
        NotApplicableError: for a model without experts, or rows of a single role.
    """
    roles = subject.batch.roles.flatten().cpu().numpy()
    layers = record_choices(subject.model, subject.batch)
    if (roles == roles[0]).all():
        raise NotApplicableError("all tokens have the same role")
    return [measure_preferences(layers, roles, subject.task.role_names, subject.seed)]


def measure_preferences(
    layers: Sequence[ExpertChoices], roles: Int[np.ndarray, " n"], names: tuple[str, ...], seed: int
) -> RolePreferences:
    """Measure what the choices of all layers tell about the roles of tokens.

    Shuffles and sample of tokens are drawn from the seed, and are the same in all layers.
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
    tokens: Int[np.ndarray, " m"],
) -> LayerPreference:
    """Measure what the choices of some tokens in one layer tell about their roles.

    The experts that reveal most are kept, `shown` in number.
    """
    roles, indices = roles[tokens], chosen.indices[tokens].reshape(len(tokens), -1)
    # Number only the experts that were chosen, to keep the table small.
    known, experts = np.unique(indices, return_inverse=True)
    experts = experts.reshape(indices.shape)
    counts = distributions.count_joint(experts, roles)
    counts = np.pad(counts, ((0, 0), (0, n_roles - counts.shape[1])))
    shuffled = distributions.permutation_null(experts, roles, np.random.default_rng(seed), ROUNDS)
    load, shares = distributions.compute_shares(counts.sum(1)), distributions.compute_shares(counts)
    overall = distributions.compute_shares(counts.sum(0))
    ratio = np.divide(shares, overall, out=np.ones_like(shares), where=shares > 0)
    told = load * (shares * np.log(ratio)).sum(1)
    first = np.argsort(-told, kind="stable")[:shown]
    return LayerPreference(
        layer=chosen.layer,
        information=distributions.mutual_information(counts),
        shuffled=float(shuffled.mean()),
        experts=known[first].astype(np.int64),
        load=load[first],
        shares=shares[first],
        null=shuffled,
    )

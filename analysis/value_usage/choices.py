"""The values that tokens of inner function attention choose, what for, and since when."""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Bool, Float, Int

from analysis.base import Finding, Table, thin
from analysis.figures import Axis, Colors, Curves, Line, Map, curves, heat
from analysis.scoring import record
from analysis.statistics.distributions import (
    count_joint,
    effective_number,
    entropy,
    gini,
    kl_to_uniform,
    mutual_information,
    permutation_null,
)
from analysis.words import format_ends, percent
from lab.intervals import bootstrap
from lab.layers.inner_function import InnerFunctionAttention
from lab.models import LanguageModel
from lab.training.run import Run
from tasks.base import Batch, count_rows

LAYERS = 4
"""Maximum number of layers that share a figure, and in which values are forced."""
BANDS = 8
"""Number of equal bands of positions that a choice may depend on."""
SHUFFLES = 100
"""Number of shuffles that give the mutual information to expect by chance."""
ROUNDING = 1e-9
"""Amounts of information that differ by less than this count as equal, nats."""
LABELLED = 12
"""Maximum number of values whose shares are written into the map."""
HISTORY_TOKENS = 2**11
"""Number of tokens whose choices are followed over training."""
STEPS = 24
"""Maximum number of steps of a run at which their choices are recorded."""
LINES = 6
"""Maximum number of values with a line of their own."""


@dataclass(frozen=True)
class ValueChoices:
    """What a layer's tokens choose."""

    indices: Int[np.ndarray, "b t k"]
    scores: Float[np.ndarray, "b t n_v"]


def find_value_layers(model: LanguageModel) -> dict[int, InnerFunctionAttention]:
    """Return the layers whose tokens choose values, by block."""
    mixers = {i: getattr(block, "mixer", None) for i, block in enumerate(model.blocks)}
    return {i: m for i, m in mixers.items() if isinstance(m, InnerFunctionAttention)}


def record_choices(model: LanguageModel, batch: Batch) -> dict[int, ValueChoices]:
    """Run a model on a batch and return what the tokens choose, by block."""
    points = {
        i: [f"blocks.{i}.mixer.hook_value_{what}" for what in ("indices", "scores")]
        for i in find_value_layers(model)
    }
    seen = record(model, batch, [name for names in points.values() for name in names])
    return {
        i: ValueChoices(*(seen[name].cpu().numpy() for name in names))
        for i, names in points.items()
    }


def measure_loads(indices: Int[np.ndarray, "*b k"], n_values: int) -> Float[np.ndarray, " n_v"]:
    """Return the share of tokens that choose each value; NaN without tokens."""
    tokens = indices.size // indices.shape[-1]
    if not tokens:
        return np.full(n_values, np.nan)
    return np.bincount(indices.ravel(), minlength=n_values) / tokens


def measure_margins(chosen: ValueChoices) -> Float[np.ndarray, " n"]:
    """Return each token's k-th highest score less the next; nothing if all values are chosen."""
    k, n_values = chosen.indices.shape[-1], chosen.scores.shape[-1]
    if k == n_values:
        return np.zeros(0, chosen.scores.dtype)
    ranked = -np.sort(-chosen.scores.reshape(-1, n_values), axis=-1)
    return ranked[:, k - 1] - ranked[:, k]


def measure_ties(margins: Float[np.ndarray, " n"]) -> float:
    """Return the share of tokens whose margin is exactly 0."""
    return float((margins == 0).mean()) if margins.size else 0.0


@dataclass(frozen=True)
class Dependence:
    """How much a label of tokens tells about the values they choose.

    Attributes:
        information: I(value; label), plug-in estimate, nats.
        null_high: the largest I under `SHUFFLES` shuffles of the labels.
        bound: min(H(label), H(value)), nats, which I cannot exceed.
    """

    information: float
    null_high: float
    bound: float

    @property
    def shows(self) -> bool:
        """Whether I is above that of shuffled labels, by more than rounding."""
        return self.information > self.null_high + ROUNDING

    def __str__(self) -> str:
        return f"{self.information:.3f} of {self.bound:.3f} ({self.null_high:.3f})"


@dataclass(frozen=True)
class LayerUsage:
    """How a layer uses its values.

    Attributes:
        shares: share of tokens that choose each value, in [0, 1].
        by_role: the same among the tokens of each role; NaN for a role that does not occur.
        used: number of values that any token chooses.
        effective: e^H of the shares, 1 … n_v.
        kl: KL divergence of the shares to uniform, nats; 0 … log n_v.
        gini: of the shares, 0 (uniform) … 1 − 1/n_v.
        margin: median of the last chosen score less the next; NaN if all values are chosen.
        ties: share of tokens whose margin is exactly 0: the lower index is chosen.
    """

    layer: int
    shares: Float[np.ndarray, " n_v"]
    by_role: Float[np.ndarray, "roles n_v"]
    used: int
    effective: float
    kl: float
    gini: float
    role: Dependence
    band: Dependence
    margin: float
    ties: float


@dataclass(frozen=True)
class ValueUses(Finding):
    """How every layer uses its values."""

    title = "Share of tokens that choose each value, by role"
    reading = (
        "Each row of a map sums to the number of values that a token chooses. e^H: the number of "
        "values that, used evenly, would be as diverse. Role and position band: the mutual "
        "information of value and label, in nats, of the smaller of their entropies; in brackets, "
        "the largest of "
        f"{SHUFFLES} shuffles of the labels. Margin: the last chosen score less the next, the "
        "median; a tie is 0. The first layers are shown."
    )
    layers: tuple[LayerUsage, ...]
    role_names: tuple[str, ...]

    @property
    def says(self) -> str:
        """How many values are used, and in how many layers the choice depends on the role."""
        used = [
            f"{layer.used} of {len(layer.shares)} in layer {layer.layer}"
            for layer in self.layers[:LAYERS]
        ]
        shows = sum(layer.role.shows for layer in self.layers)
        return (
            f"Values that tokens use: {', '.join(used)}; layers whose choice depends on the role: "
            f"{shows} of {len(self.layers)}."
        )

    def numbers(self) -> Table:
        """Return how evenly the first layers use their values, and what their choice tells."""
        columns = "layer", "e^H", "KL to uniform", "Gini", "role", "position band", "margin (ties)"
        rows = (
            (
                f"{of.layer}",
                f"{of.effective:.2f}",
                f"{of.kl:.2f}",
                f"{of.gini:.2f}",
                f"{of.role}",
                f"{of.band}",
                "–" if math.isnan(of.margin) else f"{of.margin:.2g} ({percent(of.ties)})",
            )
            for of in self.layers[:LAYERS]
        )
        return Table(columns, tuple(rows))

    def figure(self) -> go.Figure:
        """Draw the share of each role's tokens that choose each value, a map per layer."""
        labels, maps = [*self.role_names, "all tokens"], []
        few = max(len(of.shares) for of in self.layers) <= LABELLED
        for of in self.layers[:LAYERS]:
            values = np.arange(len(of.shares))
            columns = list(map(str, values)) if few else values
            shares = np.vstack([of.by_role, of.shares])
            maps.append(Map(shares, labels, columns, f"layer {of.layer}"))
        colors = Colors(unit="share", ends=(0, 1))
        return heat(maps, colors, Axis("value"), Axis(), numbers=few)


def measure_usage(
    layer: int,
    chosen: ValueChoices,
    roles: Int[np.ndarray, "b t"],
    n_roles: int,
    rng: np.random.Generator,
) -> LayerUsage:
    """Measure how a layer uses its values."""
    n_values = chosen.scores.shape[-1]
    shares = measure_loads(chosen.indices, n_values)
    flat = chosen.indices.reshape(-1, chosen.indices.shape[-1])
    seq_len = roles.shape[1]
    band = np.broadcast_to(np.arange(seq_len) * BANDS // seq_len, roles.shape)
    margins = measure_margins(chosen)
    by_role = [measure_loads(chosen.indices[roles == role], n_values) for role in range(n_roles)]
    return LayerUsage(
        layer=layer,
        shares=shares,
        by_role=np.stack(by_role),
        used=int((shares > 0).sum()),
        effective=float(effective_number(shares)),
        kl=float(kl_to_uniform(shares)),
        gini=float(gini(shares)),
        role=measure_dependence(flat, roles.ravel(), rng),
        band=measure_dependence(flat, band.ravel(), rng),
        margin=float(np.median(margins)) if margins.size else math.nan,
        ties=measure_ties(margins),
    )


def measure_dependence(
    chosen: Int[np.ndarray, "n k"], labels: Int[np.ndarray, " n"], rng: np.random.Generator
) -> Dependence:
    """Measure how much a label of tokens tells about the values they choose."""
    counts = count_joint(chosen, labels)
    null = permutation_null(chosen, labels, rng, SHUFFLES)
    return Dependence(
        information=mutual_information(counts),
        null_high=float(null.max()),
        bound=min(float(entropy(counts.sum(side))) for side in (0, 1)),
    )


@dataclass(frozen=True)
class ValueHistory(Finding):
    """A layer's choices over training, on a few fixed rows.

    Attributes:
        shares: share of tokens that choose each value.
        used: number of values that any of them chooses.
        ties: share of tokens whose k-th and next score tie.
        churn: share of tokens that choose another set of values than at the step before; NaN at
            the first step.
        churn_interval: its 95 % interval, by resampling rows; NaN for fewer than two rows.
        churn_dealt: its mean if the step's choices were shuffled among the tokens.
    """

    reading = (
        "The same rows at every step; steps are spaced by log₂(step + 1). Above: how many tokens "
        f"choose each value, of more than {LINES} values those with the highest share at any step. "
        "Middle: how many values are in use. Below: tokens that changed their values since the "
        "step before, with 95 % intervals by resampling rows; those that would change if the later "
        "choices were shuffled among the tokens; and tied ones, whose last chosen score equals the "
        "next, as all do where the keys are zero."
    )
    layer: int
    steps: Int[np.ndarray, " steps"]
    shares: Float[np.ndarray, "steps n_v"]
    used: Int[np.ndarray, " steps"]
    effective: Float[np.ndarray, " steps"]
    ties: Float[np.ndarray, " steps"]
    churn: Float[np.ndarray, " steps"]
    churn_interval: Float[np.ndarray, "steps 2"]
    churn_dealt: Float[np.ndarray, " steps"]
    title: str

    @property
    def says(self) -> str:
        """How many values are used first and last, and how many tokens still change."""
        used, steps = self.used, self.steps
        low, high = self.churn_interval[-1]
        return (
            f"Tokens use {used[0]} of {self.shares.shape[1]} values at step {steps[0]:,} (scores "
            f"tie for {percent(self.ties[0])} of the tokens) and {used[-1]} at step {steps[-1]:,}; "
            f"between the last two steps {percent(self.churn[-1])} "
            f"{format_ends(low, high, percent)} of the tokens change their values "
            f"(shuffled: {percent(self.churn_dealt[-1])})."
        )

    def figure(self) -> go.Figure:
        """Draw shares, evenness and churn by step, one below the other."""
        most = np.sort(np.argsort(-self.shares.max(0), kind="stable")[:LINES]).tolist()
        even = {"values used": self.used, "e^H, as many used evenly": self.effective}
        lines = [
            [Line(f"value {value}", self.steps, self.shares[:, value]) for value in most],
            [Line(name, self.steps, y) for name, y in even.items()],
            [
                Line("changed since", self.steps, self.churn, self.churn_interval),
                Line("tied at the last place", self.steps, self.ties),
                Line("changed if shuffled", self.steps, self.churn_dealt, look=-1),
            ],
        ]
        axes = (
            Axis("share of tokens", "share", ends=(0, 1.08 * float(self.shares.max()))),
            Axis("values", ends=(0, 1.08 * self.shares.shape[1])),
            Axis("share of tokens", "share"),
        )
        panels = [Curves(some, y, height=150) for some, y in zip(lines, axes, strict=True)]
        return curves(panels, Axis("training step", scale="steps"))


def measure_histories(run: Run, batch: Batch, rng: np.random.Generator) -> list[ValueHistory]:
    """Record what tokens of the batch's first rows choose, over the steps of a run, by layer."""
    steps = thin(run.list_steps(), STEPS)
    rows = batch[: count_rows(HISTORY_TOKENS, batch.inputs.shape[1])].to("cpu")
    choices = [record_choices(run.load_model(step), rows) for step in steps]
    found, unknown = [], (math.nan, math.nan)
    for layer in choices[0]:
        of = [at[layer] for at in choices]
        shares = np.stack([measure_loads(at.indices, at.scores.shape[-1]) for at in of])
        moves = [(old.indices, new.indices) for old, new in pairwise(of)]
        of_rows = [find_changed(*move).mean(-1) for move in moves]
        found.append(
            ValueHistory(
                layer=layer,
                steps=np.array(steps),
                shares=shares,
                used=(shares > 0).sum(-1),
                effective=effective_number(shares),
                ties=np.array([measure_ties(measure_margins(at)) for at in of]),
                churn=np.array([math.nan, *(rows.mean() for rows in of_rows)]),
                churn_interval=np.array([unknown, *(bootstrap(rows, rng) for rows in of_rows)]),
                churn_dealt=np.array([math.nan, *(expect_churn(*move) for move in moves)]),
                title=f"Layer {layer} · use of values over training",
            )
        )
    return found


def find_changed(
    before: Int[np.ndarray, "*b k"], after: Int[np.ndarray, "*b k"]
) -> Bool[np.ndarray, "*b"]:
    """Return which tokens choose another set of values than before."""
    return (np.sort(before, -1) != np.sort(after, -1)).any(-1)


def expect_churn(before: Int[np.ndarray, "*b k"], after: Int[np.ndarray, "*b k"]) -> float:
    """Return the mean share of changed tokens if the later choices were shuffled among them.

        1 − Σ_s p_before(s) p_after(s)

    with p the share of tokens that choose the set s.
    """
    k, tokens = before.shape[-1], before.size // before.shape[-1]
    sets = np.concatenate([np.sort(z, -1).reshape(-1, k) for z in (before, after)])
    kinds, index = np.unique(sets, axis=0, return_inverse=True)
    then, now = (np.bincount(part, minlength=len(kinds)) for part in np.split(index.ravel(), 2))
    return float(1 - then @ now / tokens**2)

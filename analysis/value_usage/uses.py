"""How each layer uses its values, and whether the choice depends on role or position."""

import html
import math
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int
from plotly.subplots import make_subplots

from analysis.base import Finding, Words
from analysis.plots.panels import stack_panels
from analysis.plots.style import HEAD, SEQUENTIAL, new_figure
from analysis.statistics.distributions import (
    count_joint,
    effective_number,
    entropy,
    gini,
    kl_to_uniform,
    miller_madow,
    mutual_information,
    permutation_null,
)
from analysis.value_usage.choices import (
    LAYERS,
    ValueChoices,
    measure_loads,
    measure_margins,
    measure_ties,
)
from analysis.words import capitalize, percent
from lab.layers.inner_function import InnerFunctionAttention

BANDS = 8
"""Number of equal bands of positions that a choice may depend on."""
SHUFFLES = 100
"""Number of shuffles that give the mutual information to expect by chance."""
ROUNDING = 1e-9
"""Amounts of information that differ by less than this count as equal, nats."""
NAMED = 3
"""Maximum number of layers that a sentence names."""
LABELLED = 12
"""Maximum number of values whose shares are written into the map."""
LINE, GAP, FOOT = 26, 62, 100
"""Height of a line of the map, of a gap between maps and of what is below them, px."""


@dataclass(frozen=True)
class Dependence:
    """How much a label of tokens tells about the values they choose.

    Attributes:
        information: I(value; label), plug-in estimate, nats.
        corrected: the same with the Miller–Madow correction; may be below 0.
        null: mean of I under shuffled labels.
        null_high: the largest I under `SHUFFLES` shuffles of the labels.
        bound: min(H(label), H(value)), nats, which I cannot exceed.
    """

    information: float
    corrected: float
    null: float
    null_high: float
    bound: float

    @property
    def shows(self) -> bool:
        """Whether I is above that of shuffled labels, by more than rounding."""
        return self.information > self.null_high + ROUNDING

    def summarize(self) -> str:
        """Summarize the information, its bound and that of shuffled labels."""
        return f"I = {self.information:.3f} of {self.bound:.3f} nats, shuffled {self.null_high:.3f}"


@dataclass(frozen=True)
class LayerUsage:
    """How a layer uses its values.

    Attributes:
        layer: index of the block.
        retrieval: how the chosen rows are weighted.
        k: number of values that a token chooses.
        shares: share of tokens that choose each value, in [0, 1]; Σ = k.
        by_role: the same among the tokens of each role; NaN for a role that does not occur.
        used: number of values that any token chooses.
        effective: e^H of the shares, 1 … n_v.
        kl: KL divergence of the shares to uniform, nats; 0 … log n_v.
        gini: of the shares, 0 (uniform) … 1 − 1/n_v.
        role: what a token's role tells about its values.
        band: what its band of positions tells.
        margins: 5, 25, 50, 75 and 95 % quantiles of the k-th score less the next; NaN for k = n_v.
        ties: share of tokens whose margin is exactly 0: the lower index is chosen.
    """

    layer: int
    retrieval: str
    k: int
    shares: Float[np.ndarray, " n_v"]
    by_role: Float[np.ndarray, "roles n_v"]
    used: int
    effective: float
    kl: float
    gini: float
    role: Dependence
    band: Dependence
    margins: Float[np.ndarray, " 5"]
    ties: float

    def summarize(self) -> str:
        """Summarize how many values are used, and whether the choice depends on the role."""
        text = f"layer {self.layer} uses {self.used} of {len(self.shares)} values "
        text += f"(e^H {self.effective:.2f})"
        if self.ties == 1:
            return f"{text}: the scores of every token tie"
        if self.used == 1:
            return text
        if self.role.bound == 0:
            return f"{text}; all tokens have the same role"
        verb = "depends on" if self.role.shows else "shows no dependence on"
        return f"{text}, and the choice {verb} the role ({self.role.summarize()})"

    def list_measures(self) -> str:
        """List the other measures of the layer."""
        text = (
            f"layer {self.layer}: KL to uniform {self.kl:.2f} nats, Gini {self.gini:.2f}, position "
            f"band {self.band.summarize()}, I(value; role) corrected {self.role.corrected:.3f}"
        )
        if not math.isnan(self.margins[2]):
            text += f", median margin {self.margins[2]:.2g}, ties {percent(self.ties)}"
        return text


@dataclass(frozen=True)
class ValueUses(Finding):
    """How every layer uses its values."""

    layers: tuple[LayerUsage, ...]
    role_names: tuple[str, ...]

    def describe(self) -> Words:
        """Describe the first layers."""
        named = self.layers[:NAMED]
        says = f"{capitalize('; '.join(layer.summarize() for layer in named))}."
        measures = "; ".join(layer.list_measures() for layer in named)
        reading = (
            "Each row of a map sums to the number of values that a token chooses. e^H: the "
            "number of values that, used evenly, would be as diverse. I: the mutual information of "
            "value and role, as a share of the smaller entropy; shuffled: the largest "
            f"of {SHUFFLES} shuffles of the roles. {capitalize(measures)}."
        )
        if len(self.layers) > LAYERS:
            reading += f" The first {LAYERS} of {len(self.layers)} layers are shown."
        return Words(
            title="Share of tokens that choose each value, by role",
            says=says,
            reading=reading,
            alt=f"Heat map of use by role and value. {says}",
        )

    def draw(self) -> go.Figure:
        """Draw the share of each role's tokens that choose each value, a map per layer."""
        layers = self.layers[:LAYERS]
        labels = [*map(html.escape, self.role_names), "all tokens"]
        height, spacing = stack_panels(len(layers), LINE * len(labels), GAP)
        fig = make_subplots(
            rows=len(layers),
            cols=1,
            subplot_titles=[f"layer {layer.layer}" for layer in layers],
            vertical_spacing=spacing,
            figure=new_figure(height=HEAD + 28 + height + FOOT),
        )
        for row, layer in enumerate(layers, start=1):
            shares = np.vstack([layer.by_role, layer.shares])
            few = shares.shape[1] <= LABELLED
            fig.add_heatmap(
                z=shares.astype(np.float32),
                x=list(range(shares.shape[1])),
                y=labels,
                coloraxis="coloraxis",
                texttemplate="%{z:.0%}" if few else None,
                xgap=1,
                ygap=1,
                hoverongaps=False,
                hovertemplate="%{y}, value %{x}: %{z:.2%}<extra></extra>",
                row=row,
                col=1,
            )
            if few:
                fig.update_xaxes(dtick=1, row=row, col=1)
        fig.update_annotations(font_size=11)
        fig.update_xaxes(showgrid=False, ticks="", title_text="value")
        fig.update_yaxes(autorange="reversed", showgrid=False, ticks="", automargin="left")
        return fig.update_layout(
            margin={"t": HEAD + 28, "b": FOOT},
            coloraxis={
                "colorscale": SEQUENTIAL,
                "cmin": 0,
                "cmax": 1,
                "colorbar": {"nticks": 6, "tickformat": ".0%"},
            },
        )


def measure_usage(
    layer: int,
    module: InnerFunctionAttention,
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
    quantiles = [0.05, 0.25, 0.5, 0.75, 0.95]
    return LayerUsage(
        layer=layer,
        retrieval=module.retrieval,
        k=module.n_chosen,
        shares=shares,
        by_role=np.stack(
            [measure_loads(chosen.indices[roles == role], n_values) for role in range(n_roles)]
        ),
        used=int((shares > 0).sum()),
        effective=float(effective_number(shares)),
        kl=float(kl_to_uniform(shares)),
        gini=float(gini(shares)),
        role=measure_dependence(flat, roles.ravel(), rng),
        band=measure_dependence(flat, band.ravel(), rng),
        margins=np.quantile(margins, quantiles) if margins.size else np.full(5, np.nan),
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
        corrected=miller_madow(counts),
        null=float(null.mean()),
        null_high=float(null.max()),
        bound=min(float(entropy(counts.sum(side))) for side in (0, 1)),
    )

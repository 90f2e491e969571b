"""Which components carry the answer: one mixer's or state transform's output at some positions.

`effects.restore` patches the whole residual stream. This module patches a single addend of it: what
one mixer or state transform adds in the clean row replaces what it adds in the corrupt row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int
from torch import Tensor

from analysis.base import Finding, Words
from analysis.interventions import patch
from analysis.links import IN_PLACE, Offsets
from analysis.mechanism.effects import SITE_NAMES, SITES, Baseline, estimate_share, locate_sites
from analysis.mechanism.shares import format_share
from analysis.mechanism.swapped_keys import Couples, compute_margins
from analysis.plots.style import new_figure
from analysis.scoring import scored
from analysis.statistics.estimates import thin
from analysis.words import capitalize, join_names, name_place
from lab.hooks import HookPoint
from lab.models import LanguageModel
from tasks.base import Batch

COMPONENT_SITES = tuple(site for site in SITES if site != "elsewhere")
"""Where to restore a component's output."""
POINTS = {"mixer": "hook_attn_out", "transform": "hook_mlp_out"}
"""Hook points of what each component of a block adds to the residual stream."""
LAYERS = 12
"""Maximum number of layers whose components are restored; deeper models get evenly spread ones."""
BLOCK_TOKENS = 2**19
"""Maximum number of tokens in all forward passes, times blocks; it limits the number of rows."""
FEWEST_ROWS = 4
ROW = 26
"""Height of one line of the figure in pixels."""
COLUMNS = ("keys", "values", "queries", "placebo")
CARRIES = 1 / 3
"""A component carries the answer if it surely restores more than this share."""


@dataclass(frozen=True)
class Components(Finding):
    """The share of the answer that returns when one component's clean output is patched in.

    One component's output in the clean rows replaces its output in the corrupt rows at some
    positions:

        share = Σ (patched − corrupt) / Σ (clean − corrupt)  of the margin, over queries

    as in `effects.Restored`, with the sites of `COMPONENT_SITES`. Everything else in the residual
    stream stays the corrupt row's, so the shares of several components may add up.

    Attributes:
        layers: block of each component [n].
        components: "mixer" or "transform" for each component, n in all.
        share: one row per component, one column per site.
        interval: 95 % interval by resampling rows, low and high.
        rows: number of rows measured.
        queries: number of queries measured.
        n_layers: blocks of the model; some are left out if there are more than `LAYERS`.
        offsets: how far after a value its key is gathered, where a convolution reads there.
    """

    layers: Int[np.ndarray, " n"]
    components: tuple[str, ...]
    share: Float[np.ndarray, "n 4"]
    interval: Float[np.ndarray, "n 4 2"]
    rows: int
    queries: int
    n_layers: int
    offsets: Offsets = IN_PLACE

    def describe(self) -> Words:
        """Name the components that surely carry the answer, or the one that comes closest."""
        title = f"Which component carries the answer, {self.queries} queries of {self.rows} rows"

        def describe_share(n: int, s: int) -> str:
            low, high = self.interval[n, s]
            return (
                f"layer {self.layers[n]}'s {self.components[n]} at "
                f"{self._name_site(s)} {format_share(self.share[n, s])} "
                f"({format_share(low)} to {format_share(high)}; placebo "
                f"{format_share(self.share[n, -1])})"
            )

        carriers = find_carriers(self)
        if carriers:
            parts = "; ".join(describe_share(n, s) for n, s in carriers[:4])
            says = f"Components that restore more than a third of the answer alone: {parts}"
            says += f"; and {len(carriers) - 4} more." if len(carriers) > 4 else "."
        else:
            real = np.nan_to_num(self.share[:, :-1], nan=-np.inf)
            n, s = np.unravel_index(int(real.argmax()), real.shape)
            most = describe_share(int(n), int(s))
            says = f"No single component surely restores a third of the answer; at most, {most}."
        reading = (
            "Corrupt rows are clean rows in which pairs exchanged keys. In each cell, what one "
            "mixer or state transform adds to the residual stream at one kind of position is "
            "replaced by what it adds in the clean row. At 0 the answer stays the corrupt row's; "
            "at 1 it is the clean row's again. Bold: the 95 % interval over rows excludes 0. "
            "Placebo: as many random other positions. If components work in a chain, each link "
            "appears here by itself."
        )
        reading += self.offsets.explain()
        if len(set(self.layers.tolist())) < self.n_layers:
            reading += f" Some of the {self.n_layers} layers are left out."
        alt = f"Heat map of restored share by component and site. {says}"
        return Words(title, says, reading, alt, gist=self._name_carriers(carriers))

    def _name_site(self, s: int) -> str:
        """Name a site, "the keys" or another."""
        site = COMPONENT_SITES[s]
        return name_place(
            self.offsets.gathered if site == "value" else 0, f"the {SITE_NAMES[site]}"
        )

    def _name_carriers(self, carriers: Sequence[tuple[int, int]]) -> str:
        """Say in one sentence which components restore the answer alone; nothing without any."""
        if not carriers:
            return ""
        names = [
            f"layer {self.layers[n]}'s {self.components[n]} at {self._name_site(s)}"
            for n, s in carriers[:4]
        ]
        more = f", and {len(carriers) - 4} more" if len(carriers) > 4 else ""
        verb = "each restore" if len(carriers) > 1 else "restores"
        said = f"{join_names(names)}{more} {verb} more than a third of the answer alone."
        return capitalize(said)

    def draw(self) -> go.Figure:
        """Draw the restored shares as colours, and as numbers."""
        names = [
            f"{layer} · {kind}" for layer, kind in zip(self.layers, self.components, strict=True)
        ]
        fig = new_figure(height=64 + ROW * max(3, len(names)) + 92)
        fig.add_heatmap(
            x=COLUMNS,
            y0=0,
            dy=1,
            z=self.share.astype(np.float32),
            text=_format_numbers(self),
            texttemplate="%{text}",
            customdata=[[name] * len(COLUMNS) for name in names],
            coloraxis="coloraxis",
            xgap=2,
            ygap=2,
            hovertemplate="layer %{customdata} at the %{x}: %{text}<extra></extra>",
        )
        fig.update_layout(
            coloraxis={
                "cmin": -1,
                "cmax": 1,
                "colorbar": {
                    "tickvals": [-1, -0.5, 0, 0.5, 1],
                },
            },
        )
        fig.add_annotation(
            text="answer restored, share of the margin",
            x=0.5,
            xref="paper",
            y=0,
            yref="paper",
            yshift=-26,
        )
        fig.update_xaxes(side="top", showgrid=False, ticks="")
        fig.update_yaxes(
            range=[len(names) - 0.5, -0.5],
            tickvals=list(range(len(names))),
            ticktext=names,
            showgrid=False,
            ticks="",
            title_text="layer",
            automargin="left",
        )
        return fig.update_layout(margin={"t": 72, "b": 84})


def measure_components(
    model: LanguageModel, pairs: Couples, known: Baseline, rng: np.random.Generator
) -> Components:
    """Restore each component's output at each site, one at a time."""
    found = _list_components(model)
    n_layers, seq_len = len(model.blocks), pairs.clean.inputs.shape[1]
    passes = len(found) * len(COMPONENT_SITES) + 2
    rows = max(FEWEST_ROWS, BLOCK_TOKENS // (passes * n_layers * seq_len))
    pairs, known = pairs[:rows], known[:rows]
    names = [f"blocks.{layer}.{POINTS[kind]}" for layer, kind in found]
    clean = _cache_outputs(model, pairs.clean, names)
    places = locate_sites(pairs, rng)
    shape = len(found), len(COMPONENT_SITES)
    shares, intervals = np.zeros(shape), np.zeros((*shape, 2))
    for n, name in enumerate(names):
        for s, site in enumerate(COMPONENT_SITES):
            at, positions = places[site].nonzero(as_tuple=True)
            with patch(model, name, clean[name], rows=at, positions=positions):
                margins = compute_margins(scored(model, pairs.corrupt), pairs)
            shares[n, s], intervals[n, s] = estimate_share(known.sum_changes(margins), rng)
    return Components(
        layers=np.array([layer for layer, _ in found]),
        components=tuple(kind for _, kind in found),
        share=shares,
        interval=intervals,
        rows=len(pairs.query),
        queries=2 * int(pairs.valid.sum()),
        n_layers=n_layers,
    )


def find_carriers(found: Components) -> list[tuple[int, int]]:
    """Return each (component, site) that surely carries more than a third, largest share first.

    Surely means that the low end of its interval is above both a third and the high end of the
    interval of the same component's placebo.
    """
    low, placebo = found.interval[:, :-1, 0], found.interval[:, -1:, 1]
    sure = (low > CARRIES) & (low > placebo)
    order = np.argsort(-np.nan_to_num(found.share[:, :-1], nan=-np.inf), axis=None)
    pairs = zip(*np.unravel_index(order, sure.shape), strict=True)
    return [(int(n), int(s)) for n, s in pairs if sure[n, s]]


def _list_components(model: LanguageModel) -> list[tuple[int, str]]:
    """List the layer and kind of each component to restore."""
    found: list[tuple[int, str]] = []
    for layer, block in thin(list(enumerate(model.list_blocks())), LAYERS):
        parts = {"mixer": block.mixer, "transform": block.mlp}
        found += [(layer, kind) for kind, part in parts.items() if part is not None]
    return found


def _cache_outputs(model: LanguageModel, batch: Batch, names: list[str]) -> dict[str, Tensor]:
    """Run the model and return what components add to the residual stream."""
    kept: dict[str, Tensor] = {}

    def keep(added: Tensor, point: HookPoint) -> None:
        kept[point.name] = added

    with model.hooks([(names, keep)]):
        scored(model, batch)
    return kept


def _format_numbers(found: Components) -> list[list[str]]:
    """Format the shares with two digits, in bold where the interval excludes 0."""
    low, high = found.interval[..., 0], found.interval[..., 1]
    sure = (low > 0) | (high < 0)
    return [
        [
            f"<b>{value:.2f}</b>" if bold else f"{value:.2f}"
            for value, bold in zip(*row, strict=True)
        ]
        for row in zip(found.share.round(2) + 0.0, sure, strict=True)
    ]

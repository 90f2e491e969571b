"""Which component carries the answer: a mixer's or a state transform's output, at some positions.

Where `effects.restore` puts the whole residual stream back, here a single addend of it is: what one
mixer or one transform of the clean row adds, in place of what it adds in the corrupt one.
"""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int
from torch import Tensor

from analysis.base import Finding, Words
from analysis.interventions import patch
from analysis.mechanism.effects import SITES, SPOKEN, Baseline, places_of, share
from analysis.mechanism.shares import format_share
from analysis.mechanism.swapped_keys import Couples, margin
from analysis.plots.style import new_figure
from analysis.scoring import scored
from analysis.statistics.estimates import thin
from lab.hooks import HookPoint
from lab.models.language_model import Block, LanguageModel
from tasks.base import Batch

COMPONENT_SITES = tuple(site for site in SITES if site != "elsewhere")
"""Where a component's output is restored."""
ENDS = {"mixer": ("pre", "mid"), "transform": ("mid", "post")}
"""The residual stream before and behind each component of a block."""
LAYERS = 12
"""Most layers whose components are restored; of more they are evenly spread."""
BLOCK_TOKENS = 2**19
"""Tokens of all forward passes together, times blocks; rows are as many as that allows."""
FEWEST_ROWS = 4
ROW = 26
"""Height of a line of the figure, px."""
COLUMNS = ("keys", "values", "queries", "placebo")
CARRIES = 1 / 3
"""The share that a component must surely restore to be said to carry the answer."""


@dataclass(frozen=True)
class Components(Finding):
    """The output of one component of the clean rows, put into the corrupt ones at some positions.

        share = Σ (patched − corrupt) / Σ (clean − corrupt)  of the margin, over queries

    as in `effects.Restored`, with the sites of `COMPONENT_SITES`. All else that the residual stream
    holds there stays the corrupt row's, so that shares of several components may add up.

    Attributes:
        layers: block of each component [n].
        components: "mixer" or "transform", n of them.
        share: a row a component, a column a site.
        interval: 95 % by resampling rows, low and high.
        rows: of the batch.
        queries: that were measured.
        n_layers: blocks of the model; where it has more than `LAYERS`, some are left out.
    """

    layers: Int[np.ndarray, " n"]
    components: tuple[str, ...]
    share: Float[np.ndarray, "n 4"]
    interval: Float[np.ndarray, "n 4 2"]
    rows: int
    queries: int
    n_layers: int

    def describe(self) -> Words:
        """Name the components that surely carry the answer, or the one that comes nearest."""
        title = f"Which component carries the answer, {self.queries} queries of {self.rows} rows"

        def name(n: int, s: int) -> str:
            low, high = self.interval[n, s]
            return (
                f"layer {self.layers[n]}'s {self.components[n]} at the "
                f"{SPOKEN[COMPONENT_SITES[s]]} {format_share(self.share[n, s])} "
                f"({format_share(low)} to {format_share(high)}; placebo "
                f"{format_share(self.share[n, -1])})"
            )

        shown = carriers(self)
        if shown:
            says = f"By itself restores the answer: {'; '.join(name(n, s) for n, s in shown[:4])}"
            says += f"; and {len(shown) - 4} more." if len(shown) > 4 else "."
        else:
            real = np.nan_to_num(self.share[:, :-1], nan=-np.inf)
            n, s = np.unravel_index(int(real.argmax()), real.shape)
            says = f"No single component surely restores a third: at most, {name(int(n), int(s))}."
        reading = (
            "What one mixer or state transform of the clean row adds to the residual stream is put "
            "into rows in which pairs exchanged keys, at one kind of position. 0: the answer stays "
            "the corrupt row's; 1: it is the clean row's again. Bold: the 95 % interval "
            "over rows is "
            "off 0. Placebo: as many other positions. A chain of components shows one link in each."
        )
        if len(set(self.layers.tolist())) < self.n_layers:
            reading += f" Of {self.n_layers} layers some are left out."
        return Words(
            title, says, reading, f"Heat map of restored share by component and site. {says}"
        )

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
    found = _components(model)
    n_layers, seq_len = len(model.blocks), pairs.clean.inputs.shape[1]
    passes = len(found) * len(COMPONENT_SITES) + 2
    rows = max(FEWEST_ROWS, BLOCK_TOKENS // (passes * n_layers * seq_len))
    pairs, known = pairs[:rows], known[:rows]
    names = [f"blocks.{i}.hook_resid_{end}" for i, kind in found for end in ENDS[kind]]
    clean, corrupt = (_residuals(model, batch, names) for batch in (pairs.clean, pairs.corrupt))
    places = places_of(pairs, rng)
    shape = len(found), len(COMPONENT_SITES)
    shares, intervals = np.zeros(shape), np.zeros((*shape, 2))
    for n, (layer, kind) in enumerate(found):
        before, behind = (f"blocks.{layer}.hook_resid_{end}" for end in ENDS[kind])
        added = clean[behind] - clean[before]
        source = corrupt[before] + added
        for s, site in enumerate(COMPONENT_SITES):
            at, positions = places[site].nonzero(as_tuple=True)
            with patch(model, behind, source, rows=at, positions=positions):
                margins = margin(scored(model, pairs.corrupt), pairs)
            shares[n, s], intervals[n, s] = share(known.sums(margins), rng)
    return Components(
        layers=np.array([layer for layer, _ in found]),
        components=tuple(kind for _, kind in found),
        share=shares,
        interval=intervals,
        rows=len(pairs.query),
        queries=2 * int(pairs.valid.sum()),
        n_layers=n_layers,
    )


def carriers(found: Components) -> list[tuple[int, int]]:
    """Return which (component, site) surely carry more than a third, most of it first.

    Surely: the low end of the interval lies above that, and above the same component's placebo.
    """
    low, placebo = found.interval[:, :-1, 0], found.interval[:, -1:, 1]
    sure = (low > CARRIES) & (low > placebo)
    order = np.argsort(-np.nan_to_num(found.share[:, :-1], nan=-np.inf), axis=None)
    pairs = zip(*np.unravel_index(order, sure.shape), strict=True)
    return [(int(n), int(s)) for n, s in pairs if sure[n, s]]


def _components(model: LanguageModel) -> list[tuple[int, str]]:
    """Return what there is to restore: layer and kind."""
    n_layers = len(model.blocks)
    found: list[tuple[int, str]] = []
    for layer in thin(range(n_layers), LAYERS):
        block = model.blocks[layer]
        assert isinstance(block, Block)
        parts = {"mixer": block.mixer, "transform": block.mlp}
        found += [(layer, kind) for kind, part in parts.items() if part is not None]
    return found


def _residuals(model: LanguageModel, batch: Batch, names: list[str]) -> dict[str, Tensor]:
    """Return the residual stream at some points."""
    kept: dict[str, Tensor] = {}

    def keep(residual: Tensor, point: HookPoint) -> None:
        kept[point.name] = residual

    with model.hooks([(names, keep)]):
        scored(model, batch)
    return kept


def _format_numbers(found: Components) -> list[list[str]]:
    """Return the shares in two digits, in bold where the interval is off 0."""
    low, high = found.interval[..., 0], found.interval[..., 1]
    sure = (low > 0) | (high < 0)
    return [
        [
            f"<b>{value:.2f}</b>" if bold else f"{value:.2f}"
            for value, bold in zip(*row, strict=True)
        ]
        for row in zip(found.share.round(2) + 0.0, sure, strict=True)
    ]

"""How the accuracy changes when a mixer loses a band of its rotary frequencies."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.base import Finding, Subject, Words
from analysis.frequencies.rotation import find_rotary_pairs
from analysis.plots.lines import order_lines
from analysis.plots.style import MUTED, VERMILLION, make_whiskers, new_figure
from analysis.scoring import scored
from analysis.statistics.intervals import bootstrap_ratio, bound_share
from analysis.words import percent, round_percent
from lab.hooks import HookFn, HookPoint, NamesFilter
from lab.layers.mixer import RotaryPairs
from tasks.base import count_rows

BANDS = ("fast", "middle", "slow")
"""Thirds of the frequencies, the shortest wavelengths first."""
PLACEBOS = 19
"""Maximum number of random sets of pairs per layer, each as large as a band, to see what losing any
third costs.

A band that is like random ones is the worst of twenty in 5 % of cases.
"""
FEWEST_PLACEBOS = 5
"""Random sets that are always drawn; more only while a band of the layer may still matter."""
TOKENS = 100_000
"""Number of tokens of all forward passes; each ablation gets as many rows as that allows."""
FEWEST_ROWS = 3


@dataclass(frozen=True)
class BandAblation:
    """How the accuracy changes when a mixer loses some pairs of channels.

    Attributes:
        layer: index of the block.
        sides: "Q/K" or "C/B".
        name: of the band.
        pairs: first and last pair of channels, of all heads.
        wavelengths: of those two, tokens.
        change: accuracy without them less accuracy with them, in [−1, 1].
        interval: 95 %, by resampling rows.
        placebo: the change without as many random pairs, one entry per draw.
    """

    layer: int
    sides: str
    name: str
    pairs: tuple[int, int]
    wavelengths: tuple[float, float]
    change: float
    interval: tuple[float, float]
    placebo: Float[np.ndarray, " rounds"]

    @property
    def matters(self) -> bool:
        """Whether it costs accuracy, more than every random set does: by chance in 5 % of cases."""
        return self.interval[1] < 0 and self.change < float(self.placebo.min())


@dataclass(frozen=True)
class BandAblations(Finding):
    """Every band of every rotary mixer, removed one at a time.

    Attributes:
        bands: by layer, the shortest wavelengths first.
        accuracy: with all bands.
        interval: its 95 % Wilson interval, as if scored positions were independent.
        chance: the task's.
        rows: number of rows that were scored.
    """

    bands: tuple[BandAblation, ...]
    accuracy: float
    interval: tuple[float, float]
    chance: float
    rows: int

    def describe(self) -> Words:
        """Describe the bands that matter most."""
        title = "Accuracy without a third of a mixer's rotary frequencies"
        whole = percent(self.accuracy)
        above = self.interval[0] > self.chance
        matter = [band for band in self.bands if band.matters] if above else []
        if not above:
            says = f"With all frequencies {whole} of the answers are right, not shown to be above "
            says += f"chance ({percent(self.chance)}): no loss could show."
        elif not matter:
            says = f"No third is shown to cost more than random thirds do; {whole} are right with "
            says += "all of them."
        else:
            parts = (
                f"Without the {band.name} third of {band.sides} in layer {band.layer} it changes "
                f"by {_format_points(band.change)} points (95 %: "
                f"{_format_points(band.interval[0])} to {_format_points(band.interval[1])}; random "
                f"thirds: {_format_points(float(band.placebo.min()))} to "
                f"{_format_points(float(band.placebo.max()))})"
                for band in sorted(matter, key=lambda band: band.change)[:3]
            )
            says = f"With all frequencies the accuracy is {whole}. {'. '.join(parts)}."
        reading = (
            f"Dots: the change of accuracy on {self.rows} rows when these pairs of channels are "
            "zero in all heads, with the 95 % interval over rows. Diamonds: the same for as many "
            f"random pairs. A band matters if its dot is left of {PLACEBOS} diamonds and its "
            "interval is below zero: a band that is like random ones does in at most 5 % of cases. "
            f"Of {len(self.bands)} such bands, one or more do in up to "
            f"{round_percent(1 - 0.95 ** len(self.bands))}. "
            "Once no band of a layer can matter, no more diamonds are drawn."
        )
        alt = f"Dots of change of accuracy by band. {says}"
        return Words(title, says, reading, alt, gist=_name_worst(matter))

    def draw(self) -> go.Figure:
        """Draw the change of accuracy by band, with its placebo."""
        names = [f"{band.layer} · {band.sides} {band.name}" for band in self.bands]
        fig = new_figure(height=92 + 24 * len(names) + 48)
        fig.add_scatter(
            x=np.concatenate([100 * band.placebo for band in self.bands]),
            y=np.repeat(names, [len(band.placebo) for band in self.bands]),
            mode="markers",
            name="as many at random",
            marker={"symbol": "diamond-open", "size": 7, "color": MUTED},
            hovertemplate="%{y}, random pairs: %{x:+.1f} points<extra></extra>",
        )
        change = 100 * np.array([band.change for band in self.bands])
        ends = 100 * np.array([band.interval for band in self.bands]).reshape(-1, 2)
        fig.add_scatter(
            x=change,
            y=names,
            mode="markers",
            name="the band",
            marker={"size": 8, "color": VERMILLION},
            error_x=make_whiskers(change, ends, 1.4, 4),
            customdata=[
                f"wavelengths {low:,.0f} to {high:,.0f} tokens"
                for low, high in (band.wavelengths for band in self.bands)
            ],
            hovertemplate="%{y}, %{customdata}: %{x:+.1f} points<extra></extra>",
        )
        fig.add_vline(0, line={"color": MUTED, "width": 1}, layer="below")
        fig.update_xaxes(title_text="change of accuracy, percentage points")
        order_lines(fig, names)
        return fig.update_layout(margin={"t": 92})


@torch.no_grad()
def measure_bands(subject: Subject) -> BandAblations:
    """Remove the fast, middle and slow third of each rotary mixer's pairs, one at a time."""
    rotated = find_rotary_pairs(subject.model)
    passes = 1 + len(rotated) * (len(BANDS) + PLACEBOS)
    n_rows = count_rows(TOKENS, passes * subject.batch.inputs.shape[1], fewest=FEWEST_ROWS)
    batch = subject.batch[:n_rows]
    rng = np.random.default_rng(subject.seed)
    whole = scored(subject.model, batch)
    rows = whole.rows.cpu().numpy()
    right = whole.right.cpu().numpy()

    def measure_change(layer: int, pairs: Int[np.ndarray, " k"]) -> Float[np.ndarray, " q"]:
        with subject.model.hooks([remove_pairs(rotated[layer], layer, pairs)]):
            return scored(subject.model, batch).right.cpu().numpy() - 1.0 * right

    bands = []
    for layer, rotary in rotated.items():
        n_pairs = rotary.n_pairs
        thirds = np.array_split(np.arange(n_pairs), min(len(BANDS), n_pairs))
        changes = [measure_change(layer, pairs) for pairs in thirds]
        intervals = [_bound_change(change, rows, rng) for change in changes]
        lost = [c.mean() for c, (_, high) in zip(changes, intervals, strict=True) if high < 0]
        placebo: list[float] = []
        while len(placebo) < PLACEBOS:
            # A band cannot matter if one random set costs as much, whatever others cost.
            if len(placebo) >= FEWEST_PLACEBOS and not min(lost, default=0) < min(placebo):
                break
            chosen = rng.choice(n_pairs, len(thirds[0]), replace=False)
            placebo.append(float(measure_change(layer, chosen).mean()))
        waves = 2 * np.pi * rotary.base ** (np.arange(n_pairs) / n_pairs)
        for name, pairs, change, interval in zip(BANDS, thirds, changes, intervals, strict=False):
            bands.append(
                BandAblation(
                    layer=layer,
                    sides=rotary.sides,
                    name=name,
                    pairs=(int(pairs[0]), int(pairs[-1])),
                    wavelengths=(float(waves[pairs[0]]), float(waves[pairs[-1]])),
                    change=float(change.mean()),
                    interval=interval,
                    placebo=np.array(placebo),
                )
            )
    accuracy = float(right.mean())
    return BandAblations(
        tuple(bands),
        accuracy,
        bound_share(right, rows, rng),
        subject.task.chance,
        len(batch.inputs),
    )


def remove_pairs(
    rotary: RotaryPairs, layer: int, pairs: Int[np.ndarray, " k"]
) -> tuple[NamesFilter, HookFn]:
    """Return a hook, with its name, that removes pairs of channels from what a mixer compares.

    Zeros on the target's side are enough, since every product has a factor there.
    """
    n_pairs = rotary.n_pairs
    kept = torch.ones(2 * n_pairs)
    first, second = (
        (pairs, pairs + n_pairs) if rotary.layout == "half" else (2 * pairs, 2 * pairs + 1)
    )
    kept[np.concatenate([first, second])] = 0.0

    def clear(tensor: Tensor, point: HookPoint) -> Tensor:
        return tensor * kept.to(tensor.device, tensor.dtype)

    return f"blocks.{layer}.mixer.{rotary.target_hook}", clear


def _bound_change(
    change: Float[np.ndarray, " q"], rows: Int[np.ndarray, " q"], rng: np.random.Generator
) -> tuple[float, float]:
    """Return the interval of the mean change; the positions of a row stay together."""
    sums = np.bincount(rows, change), np.bincount(rows)
    return bootstrap_ratio(np.stack(sums, 1), rng)


def _format_points(change: float) -> str:
    return f"{100 * change:+.1f}"


def _name_worst(matter: Sequence[BandAblation]) -> str:
    """Say in one sentence which band costs most; nothing where none matters."""
    if not matter:
        return ""
    worst = min(matter, key=lambda band: band.change)
    return (
        f"Without the {worst.name} third of {worst.sides} in layer {worst.layer} the accuracy "
        f"changes by {_format_points(worst.change)} points, and by "
        f"{_format_points(float(worst.placebo.min()))} at most without one of "
        f"{len(worst.placebo)} random thirds."
    )

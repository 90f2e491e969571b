"""Which rotary frequencies carry the scores, of queries and keys, and of C and B?

And which does the model need: how does its accuracy change without a band of them?
"""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.base import Finding, NotApplicableError, Subject, Table
from analysis.figures import Axis, Dots, Pairs, pairs
from analysis.frequencies.lags import (
    FrequenciesByLag,
    LagCurves,
    ScoresByLag,
    find_peak,
    measure_lag_curves,
)
from analysis.frequencies.rotation import (
    Rotated,
    RotatedSides,
    find_rotary_pairs,
    measure_rotated_sides,
    sample_answers,
)
from analysis.frequencies.spectra import (
    Energies,
    FrequencySpectrum,
    FrequencyUse,
    FrequencyUses,
    measure_spectrum,
    measure_use,
)
from analysis.scoring import scored
from analysis.words import percent, round_percent
from lab.hooks import HookFn, HookPoint, NamesFilter
from lab.intervals import bootstrap_ratio, bound_share
from lab.layers.mixer import RotaryPairs
from tasks.base import count_rows

__all__ = ["TITLE", "measure"]

TITLE = "Rotary frequencies"
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


def measure(subject: Subject) -> list[Finding]:
    """Return the energy by frequency, the use on answer edges, scores by lag, and ablated bands.

    The use needs a task of stored pairs.

    Raises:
        NotApplicableError: if no mixer rotates what it compares, or rows are single tokens.
    """
    if not find_rotary_pairs(subject.model):
        raise NotApplicableError("no mixer says at which frequencies it rotates")
    seq_len = subject.batch.inputs.shape[1]
    if seq_len < 2:
        raise NotApplicableError("rows of a single token have no lags")
    rng = np.random.default_rng(subject.seed)
    kinds = sample_answers(subject.batch, rng)

    def measure_layer(
        sides: RotatedSides,
    ) -> tuple[FrequencySpectrum, LagCurves, list[FrequencyUse]]:
        uses = [measure_use(sides, name, edges, rng) for name, edges in kinds.items()]
        return measure_spectrum(sides), measure_lag_curves(sides, kinds, subject.batch, rng), uses

    layers = measure_rotated_sides(subject.model, subject.batch, measure_layer)
    spectra, curves, uses = zip(*layers, strict=True)
    findings: list[Finding] = [Energies(spectra, seq_len)]
    if kinds:
        by_kind = tuple(use for of_kind in zip(*uses, strict=True) for use in of_kind)
        findings.append(FrequencyUses(by_kind, seq_len))
    peaks = tuple(peak for layer in curves if (peak := find_peak(layer)) is not None)
    findings += [ScoresByLag(curves), FrequenciesByLag(curves, peaks)]
    return [*findings, measure_bands(subject)]


@dataclass(frozen=True)
class BandAblation(Rotated):
    """How the accuracy changes when a mixer loses some pairs of channels.

    Attributes:
        wavelengths: of its first and last pair of channels, tokens.
        change: accuracy without them less accuracy with them, in [−1, 1].
        interval: 95 %, by resampling rows.
        placebo: the change without as many random pairs, one entry per draw.
    """

    name: str
    wavelengths: tuple[float, float]
    change: float
    interval: tuple[float, float]
    placebo: Float[np.ndarray, " rounds"]

    @property
    def place(self) -> str:
        """Layer, sides and name."""
        return f"{self.layer} · {self.sides} {self.name}"

    @property
    def matters(self) -> bool:
        """Whether it costs accuracy, more than every random set does: by chance in 5 % of cases."""
        return self.interval[1] < 0 and self.change < float(self.placebo.min())


@dataclass(frozen=True)
class BandAblations(Finding):
    """Every band of every rotary mixer, removed one at a time.

    Attributes:
        bands: by layer, the shortest wavelengths first.
        interval: its 95 % Wilson interval, as if scored positions were independent.
    """

    bands: tuple[BandAblation, ...]
    accuracy: float
    interval: tuple[float, float]
    chance: float

    title = "Accuracy without a third of a mixer's rotary frequencies"
    reading = (
        "Dots: the change of accuracy when these pairs of channels are zero in all heads, with the "
        "95 % interval over rows. Crosses: the same for as many random pairs. A band matters if "
        f"its dot is left of {PLACEBOS} crosses and its interval is below zero: a band that is "
        "like random ones does in at most 5 % of cases. Once no band of a layer can matter, no "
        "more crosses are drawn."
    )

    @property
    def costly(self) -> list[BandAblation]:
        """The bands that matter, the worst first; none where accuracy may be chance."""
        above = self.interval[0] > self.chance
        matter = [band for band in self.bands if band.matters and above]
        return sorted(matter, key=lambda band: band.change)

    @property
    def says(self) -> str:
        """How many bands cost more than random ones do."""
        whole, count = percent(self.accuracy), len(self.bands)
        if not self.interval[0] > self.chance:
            return (
                f"With all frequencies {whole} of the answers are right, not shown to be above "
                f"chance ({percent(self.chance)}): no loss could show."
            )
        worst = [f"{band.place} ({100 * band.change:+.1f} points)" for band in self.costly[:3]]
        return (
            f"With all frequencies {whole} of the answers are right; thirds that cost more than "
            f"all random thirds: {', '.join(worst) or 'none'} ({len(self.costly)} of {count}; by "
            f"chance one or more in up to {round_percent(1 - 0.95**count)} of models)."
        )

    def numbers(self) -> Table | None:
        """Return the bands that cost most."""
        rows = [
            (
                band.place,
                f"{100 * band.change:+.1f}",
                "{:+.1f} to {:+.1f}".format(*(100 * end for end in band.interval)),
                f"{100 * band.placebo.min():+.1f} to {100 * band.placebo.max():+.1f}",
            )
            for band in self.costly[:8]
        ]
        columns = ("without layer", "points", "95 %", "random thirds")
        return Table(columns, tuple(rows)) if rows else None

    def figure(self) -> go.Figure:
        """Draw the change of accuracy by band, with its placebo."""
        bands, axis = self.bands, Axis("change of accuracy", unit="change")
        names = [band.place for band in bands]
        lines = np.repeat(np.arange(len(bands)), [len(band.placebo) for band in bands])
        placebo = np.concatenate([band.placebo for band in bands])
        change, ends = (np.array([getattr(b, z) for b in bands]) for z in ("change", "interval"))
        notes = [
            f"{name}, wavelengths {band.wavelengths[0]:,.0f} to {band.wavelengths[1]:,.0f} tokens"
            for name, band in zip(names, bands, strict=True)
        ]
        dots = (
            Dots("as many at random", placebo, look="placebo", lines=lines),
            Dots("the band", change, ends.reshape(-1, 2), notes=notes),
        )
        return pairs(names, Pairs(dots, axis, levels={"": 0.0}), title="layer")


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
    answers = np.bincount(rows)

    def measure_change(layer: int, chosen: Int[np.ndarray, " k"]) -> Float[np.ndarray, " q"]:
        with subject.model.hooks([remove_pairs(rotated[layer], layer, chosen)]):
            return scored(subject.model, batch).right.cpu().numpy() - 1.0 * right

    bands = []
    for layer, rotary in rotated.items():
        n_pairs = rotary.n_pairs
        thirds = np.array_split(np.arange(n_pairs), min(len(BANDS), n_pairs))
        changes = [measure_change(layer, third) for third in thirds]
        # The answers of a row stay together.
        sums = [np.stack([np.bincount(rows, change), answers], 1) for change in changes]
        intervals = [bootstrap_ratio(both, rng) for both in sums]
        lost = [c.mean() for c, (_, high) in zip(changes, intervals, strict=True) if high < 0]
        placebo: list[float] = []
        while len(placebo) < PLACEBOS:
            # A band cannot matter if one random set costs as much, whatever others cost.
            if len(placebo) >= FEWEST_PLACEBOS and not min(lost, default=0) < min(placebo):
                break
            chosen = rng.choice(n_pairs, len(thirds[0]), replace=False)
            placebo.append(float(measure_change(layer, chosen).mean()))
        waves = 2 * np.pi * rotary.base ** (np.arange(n_pairs) / n_pairs)
        bands += [
            BandAblation(
                layer=layer,
                sides=rotary.sides,
                name=name,
                wavelengths=(float(waves[third[0]]), float(waves[third[-1]])),
                change=float(change.mean()),
                interval=interval,
                placebo=np.array(placebo),
            )
            for name, third, change, interval in zip(
                BANDS, thirds, changes, intervals, strict=False
            )
        ]
    ends = bound_share(right, rows, rng)
    return BandAblations(tuple(bands), float(right.mean()), ends, subject.task.chance)


def remove_pairs(
    rotary: RotaryPairs, layer: int, chosen: Int[np.ndarray, " k"]
) -> tuple[NamesFilter, HookFn]:
    """Return a hook, with its name, that removes pairs of channels from what a mixer compares.

    Zeros on the target's side are enough, since every product has a factor there.
    """
    kept = torch.ones(rotary.n_pairs, 2)
    kept[chosen] = 0.0
    channels = (kept.T if rotary.layout == "half" else kept).flatten()

    def clear(tensor: Tensor, point: HookPoint) -> Tensor:
        return tensor * channels.to(tensor.device, tensor.dtype)

    return f"blocks.{layer}.mixer.{rotary.target_hook}", clear

"""Which rotary frequencies carry the scores? Queries and keys of attention, C and B of SSD."""

from dataclasses import dataclass
from functools import singledispatch

import numpy as np
import plotly.graph_objects as go

from analysis.base import NotApplicableError, Subject, Words
from analysis.frequencies import figures as frequency_figures
from analysis.frequencies.atlas import (
    FEWEST,
    Curves,
    Spectrum,
    Use,
    answers,
    curves,
    half_life,
    spectrum,
    use,
)
from analysis.frequencies.bands import PLACEBOS, Bands, measure_bands
from analysis.frequencies.spectra import Rotation, find_rotary_pairs, rotations
from analysis.record import figure_only
from analysis.words import percent

TITLE = "Rotary frequencies"
LEANS = 0.1
"""How far a share must be from that of a uniform spectrum for the spectrum to be said to lean."""
PREFERS = 0.5
"""How many standard deviations a lag's mean score must stand out to be called preferred."""


@dataclass(frozen=True)
class Energies:
    """The spectra of all rotated mixers.

    Attributes:
        layers: theirs.
        seq_len: tokens a row.
    """

    layers: tuple[Spectrum, ...]
    seq_len: int


@dataclass(frozen=True)
class Uses:
    """What answer edges get from each frequency, in all rotated mixers.

    Attributes:
        layers: by kind of edge, then by layer.
        seq_len: tokens a row.
    """

    layers: tuple[Use, ...]
    seq_len: int


@dataclass(frozen=True)
class Lags:
    """How scores depend on the lag, in all rotated mixers.

    Attributes:
        layers: theirs.
        seq_len: tokens a row.
    """

    layers: tuple[Curves, ...]
    seq_len: int


@dataclass(frozen=True)
class PairsByLag:
    """What each frequency adds to the score by lag, in all rotated mixers.

    Attributes:
        layers: theirs; of each the comparison `telling` is shown.
        peaks: of each layer where a lag is preferred, that lag and the frequencies behind it.
    """

    layers: tuple[Curves, ...] = figure_only()
    peaks: tuple["Peak", ...] = ()


@dataclass(frozen=True)
class Peak:
    """The lag at which a layer's most telling comparison stands out, and by which frequencies.

    Attributes:
        layer: index of the block.
        sides: "Q/K" or "C/B".
        comparison: which of the layer's.
        lag: tokens.
        rise: the mean score there above its average, standard deviations of the scores.
        wavelengths: shortest and longest of those frequencies that together add half of the rise,
            the fewest that do, tokens.
        count: how many they are.
        of: how many frequencies there are.
    """

    layer: int
    sides: str
    comparison: int
    lag: int
    rise: float
    wavelengths: tuple[float, float]
    count: int
    of: int


Atlas = Energies | Uses | Lags | PairsByLag | Bands


def measure(subject: Subject) -> list[Atlas]:
    """Return the energy by frequency, the use on answer edges, scores by lag, and ablated bands.

    The use needs a task of stored pairs.

    Raises:
        NotApplicableError: where no mixer rotates what it compares, or rows are single tokens.
    """
    if not find_rotary_pairs(subject.model):
        raise NotApplicableError("no mixer has rotary positions")
    seq_len = subject.batch.inputs.shape[1]
    if seq_len < 2:
        raise NotApplicableError("rows of a single token have no lags")
    rng = np.random.default_rng(subject.seed)
    kinds = answers(subject.batch, rng)

    def look(rotation: Rotation) -> tuple[Spectrum, Curves, list[Use]]:
        used = [use(rotation, name, edges, rng) for name, edges in kinds.items()]
        return spectrum(rotation), curves(rotation, kinds, subject.batch, rng), used

    spectra, by_lag, used = zip(*rotations(subject.model, subject.batch, look), strict=True)
    results: list[Atlas] = [Energies(spectra, seq_len)]
    if kinds:
        in_order = tuple(u for name in kinds for layer in used for u in layer if u.edge == name)
        results.append(Uses(in_order, seq_len))
    peaks = tuple(peak for layer in by_lag if (peak := peak_of(layer)) is not None)
    results += [Lags(by_lag, seq_len), PairsByLag(by_lag, peaks)]
    return [*results, measure_bands(subject)]


def peak_of(layer: Curves) -> Peak | None:
    """Return where a layer's most telling comparison stands out, if it surely does."""
    c = layer.telling
    rise = layer.rise[:, c]
    height = np.where(
        layer.pairs >= FEWEST, rise if layer.sides == "Q/K" else np.abs(rise), -np.inf
    )
    at = int(height.argmax())
    if height[at] < PREFERS:
        return None
    added = np.sign(rise[at]) * layer.by_pair[at].astype(np.float64)
    order = np.argsort(-added)
    count = int((added[order].cumsum() < np.abs(rise[at]) / 2).sum()) + 1
    waves = layer.wavelengths[order[:count]]
    return Peak(
        layer=layer.layer,
        sides=layer.sides,
        comparison=c,
        lag=int(layer.lags[at]),
        rise=float(rise[at]),
        wavelengths=(float(waves.min()), float(waves.max())),
        count=count,
        of=len(layer.wavelengths),
    )


@singledispatch
def describe(result: Atlas) -> Words:
    """Put a part of the atlas in words."""
    raise TypeError(f"{type(result).__name__} is no part of the atlas")


@singledispatch
def draw(result: Atlas) -> go.Figure | None:
    """Draw a part of the atlas."""
    raise TypeError(f"{type(result).__name__} is no part of the atlas")


@describe.register
def _(result: Energies) -> Words:
    title = "Energy of Q/K and C/B by rotary frequency"
    parts = []
    for layer in result.layers:
        at = int(np.abs(layer.long - layer.uniform_long).argmax())
        parts.append(
            f"{_place(layer, at, len(layer.long))} {percent(float(layer.long[at]))} "
            f"(uniform {percent(layer.uniform_long)}), {layer.effective[at]:.0f} effective of "
            f"{len(layer.wavelengths)} frequencies"
        )
    offset = [float((layer.long - layer.uniform_long).mean()) for layer in result.layers]
    short = _layers(result.layers, [x < -LEANS for x in offset])
    long = _layers(result.layers, [x > LEANS for x in offset])
    leans = [f"{verb} {names}" for verb, names in (
        ("wavelengths within the row, which tell positions, carry more than their share in", short),
        ("wavelengths longer than the row, which serve as content channels, in", long),
    ) if names]  # fmt: skip
    opening = "; ".join(leans) or "no layer leans to long or to short wavelengths"
    says = f"{opening[0].upper()}{opening[1:]}. "
    says += f"Energy on wavelengths longer than the row: {'; '.join(_most(parts))}."
    reading = (
        "A cell is a pair of channels: its mean |q||k| over all causal pairs of tokens, as a share "
        "of the sum, beside the share that each would have if all were equal, in doublings. The "
        f"line marks the row's length, {result.seq_len:,} tokens: what is right of it turns less "
        "than once in a row."
    )
    return Words(title, says, reading, f"Heat map of {title}. {says}")


@describe.register
def _(result: Uses) -> Words:
    title = "What answer edges get from each rotary frequency"
    parts = []
    for edge in dict.fromkeys(u.edge for u in result.layers):
        of_edge = [u for u in result.layers if u.edge == edge]
        top = max(of_edge, key=lambda u: abs(float(u.effect[u.best])))
        low, high = top.interval
        if not (low > 0 or high < 0):
            parts.append(f"{edge}: no layer's scores stand out (95 % interval holds 0)")
            continue
        best = top.best
        parts.append(
            f"{edge}: most in {_place(top, best, len(top.advantage))}, "
            f"{top.effect[best]:+.2f} standard deviations; wavelengths longer than the row carry "
            f"{percent(float(top.long[best]))} of it (they are {percent(top.uniform_long)} of all)"
        )
    says = f"{'. '.join(part[0].upper() + part[1:] for part in parts)}."
    reading = (
        "Colour is what a frequency adds to the mean score of the edges, less what it adds to "
        "edges of equal lag drawn at random in the same rows, in standard deviations of the "
        "latter's scores; the sum over frequencies stands on the right. SSD reads signed, so a "
        "strong negative counts as well. A share beyond 0 and 100 % says that the other "
        "frequencies pull the other way. The line marks the row's length."
    )
    return Words(title, says, reading, f"Heat map of {title}. {says}")


@describe.register
def _(result: Lags) -> Words:
    title = "Score by lag, mean over all pairs of tokens, decay on top"
    parts = []
    for layer in result.layers:
        # A logit below the others is attention withheld; C·B counts by its size.
        height = layer.rise if layer.sides == "Q/K" else np.abs(layer.rise)
        height = np.where(layer.pairs[:, None] >= FEWEST, height, -np.inf)
        at, c = np.unravel_index(int(height.argmax()), height.shape)
        rise = float(layer.rise[at, c])
        if layer.pairs[at] < FEWEST or abs(rise) < PREFERS:
            continue
        part = f"{_place(layer, int(c), layer.rise.shape[1])} stands {rise:+.1f} standard "
        part += f"deviations from its average at lag {layer.lags[at]:,}"
        parts.append(part)
    says = f"{'; '.join(_most(parts))}." if parts else "No layer's mean score prefers a lag."
    says = says[0].upper() + says[1:]
    fading = [layer for layer in result.layers if layer.sides == "C/B"]
    halves = [half for layer in fading if (half := half_life(layer)) is not None]
    if fading:
        says += f" Decay halves the scores within the row in {len(halves)} of {len(fading)} C/B "
        says += "layers" + (f", by lag {_range(halves)}." if halves else ".")
    reading = (
        "Grey: all pairs at a lag. Coloured: the mean content of answer edges, carried to other "
        "lags by the rotation alone. Dashed: the same times the mean decay exp Σa. Attention in "
        "logits, before any mask; C/B as inner products. Of several heads the one is drawn whose "
        "score depends most on the lag."
    )
    return Words(title, says, reading, f"Lines of {title.lower()}, a panel a layer. {says}")


@describe.register
def _(result: PairsByLag) -> Words:
    title = "What each rotary frequency adds to the score, by lag"
    comparisons = {layer.layer: layer.rise.shape[1] for layer in result.layers}
    parts = [
        f"{_place(peak, peak.comparison, comparisons[peak.layer])}, lag {peak.lag:,} "
        f"({peak.rise:+.1f} standard deviations): half of it from {peak.count} of {peak.of} "
        f"frequencies, wavelengths {_range([round(w) for w in peak.wavelengths])}"
        for peak in result.peaks
    ]
    says = f"{'; '.join(_most(parts))}." if parts else "No layer's mean score prefers a lag, so no "
    says += "" if parts else "frequency is behind one."
    says = says[0].upper() + says[1:]
    reading = (
        "A cell is what a pair of channels adds to the mean score of all pairs of tokens at a lag, "
        "above what it adds on average, in standard deviations of the scores: a column sums to how "
        f"far the lag stands out. Lags of fewer than {FEWEST} pairs of tokens are left out; of "
        "several heads the one is drawn whose score depends most on the lag."
    )
    if any(layer.sides == "C/B" for layer in result.layers):
        reading += " C/B before decay: right of the green line less than half of it is left."
    return Words(title, says, reading, f"Heat maps, a panel a layer. {says}")


@describe.register
def _(result: Bands) -> Words:
    title = "Accuracy without a third of a mixer's rotary frequencies"
    whole = percent(result.accuracy)
    matter = [band for band in result.bands if band.matters]
    if result.interval[0] <= result.chance:
        says = f"With all frequencies the model stands at chance ({whole}): nothing can be lost."
    elif not matter:
        says = f"No third costs more than random thirds do; with all of them: {whole}."
    else:
        worst = sorted(matter, key=lambda band: band.change)[:3]
        parts = (
            f"without the {band.name} third of {band.sides} in layer {band.layer} "
            f"{_points(band.change)} (95 %: {_points(band.interval[0])} to "
            f"{_points(band.interval[1])}; random thirds: {_points(float(band.placebo.min()))} to "
            f"{_points(float(band.placebo.max()))})"
            for band in worst
        )
        says = f"With all frequencies {whole} are right; {'; '.join(parts)} points."
    reading = (
        f"Dots: the change of accuracy on {result.rows} rows when these pairs of channels are zero "
        "in all heads, with the 95 % interval over rows. Diamonds: as many pairs drawn at random. "
        f"A band matters where its dot is left of {PLACEBOS} diamonds and its interval below zero: "
        "a band no other than random ones does in at most 5 % of cases. Once none can, no more "
        "diamonds are drawn."
    )
    return Words(title, says, reading, f"Dots of change of accuracy by band. {says}")


draw.register(Energies, lambda result: frequency_figures.energies(result.layers, result.seq_len))
draw.register(Uses, lambda result: frequency_figures.uses(result.layers, result.seq_len))
draw.register(Lags, lambda result: frequency_figures.lags(result.layers))
draw.register(PairsByLag, lambda result: frequency_figures.pairs_by_lag(result.layers))
draw.register(Bands, lambda result: frequency_figures.bands(result))


def _place(layer: Spectrum | Use | Curves | Peak, comparison: int, of: int) -> str:
    """Name a comparison in words."""
    kind = "head" if layer.sides == "Q/K" else "group"
    which = "" if of == 1 else f", {kind} {comparison}"
    return f"layer {layer.layer} ({layer.sides}{which})"


def _layers(layers: tuple[Spectrum, ...], chosen: list[bool]) -> str:
    """Name the chosen layers in words."""
    of_sides: dict[str, list[str]] = {}
    for layer, picked in zip(layers, chosen, strict=True):
        if picked:
            of_sides.setdefault(layer.sides, []).append(str(layer.layer))
    return " and ".join(f"{sides} of layer {', '.join(n)}" for sides, n in of_sides.items())


def _most(parts: list[str], most: int = 4) -> list[str]:
    """Return the first few parts of a sentence, and how many are left."""
    left = len(parts) - most
    return parts if left <= 0 else [*parts[:most], f"and {left} more"]


def _range(values: list[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _points(change: float) -> str:
    return f"{100 * change:+.1f}"

"""How the energy of what mixers compare is spread over rotary frequencies."""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from analysis.base import Finding, Words
from analysis.frequencies.axes import BOTTOM, ROW, TOP, HeatRows, add_heat_rows, lay_out_heat_rows
from analysis.frequencies.comparisons import join_parts, name_comparison
from analysis.frequencies.rotation import RotatedSides, average_causal_pairs
from analysis.plain import figure_only
from analysis.plots.style import new_figure
from analysis.statistics.distributions import compute_shares, effective_number
from analysis.words import capitalize, name_layers, percent

LEANS = 0.1
"""How far a share must be from a uniform spectrum's for the spectrum to lean."""
DOUBLINGS = 3
"""Where the colours end: at eight times a uniform share, and at an eighth."""


@dataclass(frozen=True)
class FrequencySpectrum:
    """How much of what a mixer compares lies at which frequency.

    Attributes:
        layer: index of the block.
        sides: "Q/K" or "C/B".
        groups: the comparison that each head uses.
        wavelengths: 2π/θ, tokens.
        share: mean |q||k| over all causal pairs, as a share of the sum over frequencies.
        effective: e^H of the shares, from 1 to m.
        long: share of the energy on wavelengths longer than the row, which hardly turn in it.
        uniform_long: the same if all frequencies had equal shares.
        coherence: |mean q̄k| / mean |q||k|, in [0, 1]; 1 where all pairs agree on the phase, so that
            the frequency tells positions; 0 where the phase depends on the content.
    """

    layer: int
    sides: str
    groups: Int[np.ndarray, " h"]
    wavelengths: Float[np.ndarray, " m"]
    share: Float[np.ndarray, "c m"]
    effective: Float[np.ndarray, " c"]
    long: Float[np.ndarray, " c"]
    uniform_long: float
    coherence: Float[np.ndarray, "c m"] = figure_only()


@dataclass(frozen=True)
class Energies(Finding):
    """The spectra of all rotary mixers.

    Attributes:
        layers: spectra by layer.
        seq_len: tokens per row.
    """

    layers: tuple[FrequencySpectrum, ...]
    seq_len: int

    def describe(self) -> Words:
        """Describe which layers lean to short or long wavelengths, and by how much."""
        title = "Energy of Q/K and C/B by rotary frequency"
        offsets = [float((layer.long - layer.uniform_long).mean()) for layer in self.layers]
        leans = [
            f"wavelengths {which} carry more than their share in {names}"
            for which, names in (
                (
                    "within the row, which tell positions,",
                    self._name([x < -LEANS for x in offsets]),
                ),
                (
                    "longer than the row, which can carry content,",
                    self._name([x > LEANS for x in offsets]),
                ),
            )
            if names
        ]
        parts = []
        for layer in self.layers:
            # What compares nothing has no spectrum, NaN.
            far = np.nan_to_num(np.abs(layer.long - layer.uniform_long), nan=-1.0)
            at = int(far.argmax())
            place = name_comparison(layer.layer, layer.sides, at, len(layer.long))
            if far[at] < 0:
                parts.append(f"layer {layer.layer} ({layer.sides}) has none")
                continue
            parts.append(
                f"{place} {percent(float(layer.long[at]))} (uniform "
                f"{percent(layer.uniform_long)}), {layer.effective[at]:.0f} effective of "
                f"{len(layer.wavelengths)} frequencies"
            )
        neither = "no layer leans to long or to short wavelengths"
        if all(layer.uniform_long in (0, 1) for layer in self.layers):
            neither = "no layer has wavelengths both within the row and longer than it"
        opening = capitalize("; ".join(leans) or neither)
        says = f"{opening}. Energy on wavelengths longer than the row: {join_parts(parts)}."
        reading = (
            "A cell is a pair of channels. The colour is its share of |q||k|, averaged over all "
            "causal pairs of tokens, as a multiple of an equal share. The line marks the row's "
            f"length, {self.seq_len:,} tokens; longer wavelengths, on its right, rotate less than "
            "once in a row."
        )
        return Words(title, says, reading, f"Heat map of {title}. {says}")

    def _name(self, chosen: list[bool]) -> str:
        """Name the chosen layers by their sides."""
        of_sides: dict[str, list[int]] = {}
        for layer, picked in zip(self.layers, chosen, strict=True):
            if picked:
                of_sides.setdefault(layer.sides, []).append(layer.layer)
        return " and ".join(f"{sides} of {name_layers(n)}" for sides, n in of_sides.items())

    def draw(self) -> go.Figure:
        """Draw the spectra, a row per comparison, wavelength to the right."""
        shown = []
        for layer in self.layers:
            ratio = layer.share * layer.share.shape[1]
            doublings = np.log2(np.maximum(ratio, 2.0**-10))
            texts = [f"{z:.2f} × uniform" for z in ratio.ravel()]
            shown.append(HeatRows(layer.layer, layer.sides, layer.wavelengths, doublings, texts))
        n_rows = sum(len(layer.values) for layer in shown)
        fig = new_figure(height=TOP + ROW * max(3, n_rows) + BOTTOM)
        labels = add_heat_rows(fig, 0, shown)
        colorbar = {
            "tickvals": list(range(-DOUBLINGS, DOUBLINGS + 1)),
            "ticktext": ["⅛", "¼", "½", "1", "2", "4", "8"],
        }
        fig.update_layout(
            coloraxis={"cmin": -DOUBLINGS, "cmax": DOUBLINGS, "colorbar": colorbar},
            margin={"l": 84, "t": TOP, "b": BOTTOM},
        )
        waves = [layer.wavelengths for layer in self.layers]
        colors = "share, as a multiple of a uniform spectrum's"
        lay_out_heat_rows(fig, waves, self.seq_len, [labels], colors)
        return fig


def measure_spectrum(sides: RotatedSides) -> FrequencySpectrum:
    """Measure how a mixer spreads what it compares over its frequencies."""
    size, product = average_causal_pairs(sides)
    share = compute_shares(size)
    waves = 2 * np.pi / sides.theta
    long = waves > sides.q.shape[1]
    return FrequencySpectrum(
        layer=sides.layer,
        sides=sides.sides,
        groups=sides.groups,
        wavelengths=waves,
        share=share,
        coherence=np.abs(product) / np.maximum(size, np.finfo(np.float64).tiny),
        effective=effective_number(size),
        long=share[:, long].sum(-1),
        uniform_long=float(long.mean()),
    )

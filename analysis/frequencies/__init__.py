"""Which rotary frequencies carry the scores, of queries and keys, and of C and B?"""

import numpy as np

from analysis.base import Finding, NotApplicableError, Subject, describe, draw
from analysis.frequencies.bands import measure_bands
from analysis.frequencies.edges import sample_answers
from analysis.frequencies.energies import Energies, FrequencySpectrum, measure_spectrum
from analysis.frequencies.frequencies_by_lag import FrequenciesByLag, find_peak
from analysis.frequencies.lag_curves import LagCurves, measure_lag_curves
from analysis.frequencies.rotation import RotatedSides, find_rotary_pairs, measure_rotated_sides
from analysis.frequencies.scores_by_lag import ScoresByLag
from analysis.frequencies.uses import FrequencyUse, FrequencyUses, measure_use

__all__ = ["TITLE", "describe", "draw", "measure"]

TITLE = "Rotary frequencies"


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
    findings += [ScoresByLag(curves, seq_len), FrequenciesByLag(curves, peaks)]
    return [*findings, measure_bands(subject)]

"""Planted energies are measured as what they are."""

import math

import numpy as np
import pytest

from analysis import frequencies
from analysis.frequencies.energies import measure_spectrum
from tests.unit.analysis.frequencies.models import (
    build_subject,
    plant_product,
)


def test_one_planted_frequency_has_all_the_energy():
    theta = 100.0 ** -(np.arange(8) / 8)
    result = measure_spectrum(plant_product(np.eye(8)[6], theta))
    assert result.effective[0] == pytest.approx(1)
    assert result.share[0, 6] == pytest.approx(1)
    assert (2 * math.pi / theta > 16).tolist() == [False] * 2 + [True] * 6
    assert result.long[0] == pytest.approx(1)
    assert result.uniform_long == 6 / 8
    assert result.coherence[0, 6] == pytest.approx(1)


def test_equal_energies_are_as_long_as_uniform():
    theta = 100.0 ** -(np.arange(8) / 8)
    result = measure_spectrum(plant_product(np.exp(1j * np.arange(8)), theta))
    assert result.effective[0] == pytest.approx(8)
    assert result.long[0] == pytest.approx(result.uniform_long)


def test_an_untrained_spectrum_does_not_lean():
    says = frequencies.describe(frequencies.measure(build_subject("AM"))[0]).says
    assert says.startswith("No layer leans to long or to short wavelengths.")

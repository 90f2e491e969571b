"""Removing a band equals a model without its weights; bands like random ones rarely matter."""

import copy

import numpy as np
import pytest
import torch

from analysis import frequencies
from analysis.frequencies.bands import (
    FEWEST_PLACEBOS,
    PLACEBOS,
    BandAblation,
    BandAblations,
    measure_bands,
    remove_pairs,
)
from analysis.scoring import scored
from lab.layers.attention import Attention
from tests.unit.analysis.frequencies.models import (
    CASES,
    build_subject,
    get_first_mixer,
)


@pytest.mark.parametrize("case", ["shared keys", "neighbouring channels", "SSD in tiled groups"])
@torch.no_grad()
def test_a_band_taken_out_is_a_model_without_its_weights(case):
    stack, options = CASES[case]
    given = build_subject(stack, options, rows=8)
    mixer = get_first_mixer(given.model)
    rotary = mixer.rotary_pairs
    assert rotary is not None
    other = copy.deepcopy(given.model)
    same = get_first_mixer(other)
    projection = same.q if isinstance(same, Attention) else same.C_proj
    weight = projection.weight.unflatten(0, (-1, 8))
    for m in (1, 2):
        interleaved = mixer.rope_layout == "interleaved"
        for channel in (2 * m, 2 * m + 1) if interleaved else (m, m + 4):
            weight[:, channel] = 0
    with given.model.hooks([remove_pairs(rotary, 0, np.array([1, 2]))]):
        hidden = given.model(given.batch.inputs)
    torch.testing.assert_close(hidden, other(given.batch.inputs))
    assert not torch.allclose(hidden, given.model(given.batch.inputs))


def test_changes_of_accuracy_are_differences_of_two_models():
    given = build_subject("AM", rows=8)
    result = measure_bands(given)
    whole = scored(given.model, given.batch).accuracy
    assert result.accuracy == whole
    assert [band.name for band in result.bands] == ["fast", "middle", "slow"]
    assert [band.pairs for band in result.bands] == [(0, 1), (2, 2), (3, 3)]
    rotary = get_first_mixer(given.model).rotary_pairs
    assert rotary is not None
    for band in result.bands:
        pairs = np.arange(band.pairs[0], band.pairs[1] + 1)
        with given.model.hooks([remove_pairs(rotary, 0, pairs)]):
            change = scored(given.model, given.batch).accuracy - whole
        assert band.change == pytest.approx(change)
        assert FEWEST_PLACEBOS <= len(band.placebo) <= PLACEBOS


def make_band(change, interval, placebo, name="fast"):
    return BandAblation(1, "C/B", name, (0, 2), (6.0, 40.0), change, interval, np.array(placebo))


@pytest.mark.parametrize(
    ("change", "interval", "matters"),
    [(-0.3, (-0.4, -0.2), True), (-0.05, (-0.1, -0.01), False), (-0.3, (-0.7, 0.1), False)],
)
def test_a_band_matters_beyond_random_ones_only(change, interval, matters):
    result = BandAblations((make_band(change, interval, [-0.1, 0.0]),), 0.9, (0.88, 0.92), 0.06, 50)
    assert result.bands[0].matters is matters
    says = frequencies.describe(result).says
    assert (
        "Without the fast third of C/B in layer 1 it changes by -30.0 points" in says
    ) is matters
    assert ("No third is shown to cost more" in says) is not matters


def test_a_band_like_random_ones_is_named_once_in_twenty(monkeypatch):
    """Bands are random sets themselves here: what each set costs is drawn, the rows agree on it."""
    given = build_subject("AM", rows=8, double=False)
    rng, named, bands = np.random.default_rng(0), 0, 0
    monkeypatch.setattr("analysis.frequencies.bands._bound_change", lambda *given: (-1.0, -0.1))

    class Lost:
        rows = torch.arange(8)
        accuracy = 1.0

        def __init__(self, share):
            self.right = torch.ones(8) if share is None else torch.full((8,), 1 - share)

    for _ in range(300):
        first = iter([None])
        monkeypatch.setattr(
            "analysis.frequencies.bands.scored",
            lambda model, batch, first=first: Lost(next(first, rng.random())),
        )
        result = measure_bands(given)
        named += sum(found.matters for found in result.bands)
        bands += len(result.bands)
    # 900 bands at one in twenty: a standard error of 0.7 points, more as three share placebos.
    assert 0.02 < named / bands < 0.08


def test_at_chance_nothing_can_be_lost():
    result = BandAblations((make_band(-0.3, (-0.4, -0.2), [0.0]),), 0.06, (0.04, 0.08), 0.06, 50)
    assert "no loss could show" in frequencies.describe(result).says
    assert frequencies.describe(result).gist == ""

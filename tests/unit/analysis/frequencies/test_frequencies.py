"""All findings of a model, and bands: without one it is a model without its weights."""

import copy

import numpy as np
import pytest
import torch

from analysis import frequencies
from analysis.base import NotApplicableError, Subject
from analysis.frequencies import (
    FEWEST_PLACEBOS,
    PLACEBOS,
    BandAblation,
    measure_bands,
    remove_pairs,
)
from analysis.frequencies.lags import ScoresByLag
from analysis.frequencies.spectra import Energies, FrequencyUses
from analysis.scoring import scored
from lab.layers.attention import Attention
from tests.unit.analysis.frequencies.models import (
    CASES,
    TASK,
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
    rotary = get_first_mixer(given.model).rotary_pairs
    assert rotary is not None
    waves = (2 * np.pi * rotary.base ** (np.arange(4) / 4)).tolist()
    for band, pairs in zip(result.bands, ([0, 1], [2], [3]), strict=True):
        assert band.wavelengths == pytest.approx((waves[pairs[0]], waves[pairs[-1]]))
        with given.model.hooks([remove_pairs(rotary, 0, np.array(pairs))]):
            change = scored(given.model, given.batch).accuracy - whole
        assert band.change == pytest.approx(change)
        assert FEWEST_PLACEBOS <= len(band.placebo) <= PLACEBOS


@pytest.mark.parametrize(
    ("change", "interval", "matters"),
    [(-0.3, (-0.4, -0.2), True), (-0.05, (-0.1, -0.01), False), (-0.3, (-0.7, 0.1), False)],
)
def test_a_band_matters_beyond_random_ones_only(change, interval, matters):
    random = np.array([-0.1, 0.0])
    band = BandAblation(1, "C/B", "fast", (6.0, 40.0), change, interval, random)
    assert band.matters is matters


def test_a_band_like_random_ones_is_named_once_in_twenty(monkeypatch):
    """Bands are random sets themselves here: what each set costs is drawn, the rows agree on it."""
    given = build_subject("AM", rows=8, double=False)
    rng, named, bands = np.random.default_rng(0), 0, 0
    monkeypatch.setattr("analysis.frequencies.bootstrap_ratio", lambda *given: (-1.0, -0.1))

    class Lost:
        rows = torch.arange(8)
        accuracy = 1.0

        def __init__(self, share):
            self.right = torch.ones(8) if share is None else torch.full((8,), 1 - share)

    for _ in range(300):
        first = iter([None])
        monkeypatch.setattr(
            "analysis.frequencies.scored",
            lambda model, batch, first=first: Lost(next(first, rng.random())),
        )
        result = measure_bands(given)
        named += sum(found.matters for found in result.bands)
        bands += len(result.bands)
    # 900 bands at one in twenty: a standard error of 0.7 points, more as three share placebos.
    assert 0.02 < named / bands < 0.08


def list_traces(finding):
    """Return what a finding's figure shows."""
    return finding.figure().to_dict()["data"]


def test_a_model_of_both_kinds_is_measured_and_drawn():
    given = build_subject("SM AM", {"S.d_state": 8}, rows=10, double=False)
    energies, uses, lags, by_pair, taken = frequencies.measure(given)
    assert isinstance(energies, Energies)
    assert isinstance(uses, FrequencyUses)
    assert [(s.layer, s.sides) for s in energies.layers] == [(0, "C/B"), (1, "Q/K")]
    assert [(u.edge, u.layer) for u in uses.layers] == [
        ("query → value", 0),
        ("query → value", 1),
        ("value → key", 0),
        ("value → key", 1),
    ]
    maps = [trace["z"]["shape"] for trace in list_traces(energies)]
    assert maps == ["1, 4", "4, 4"]
    # Panels have all pairs and two kinds of edges; those of C/B each with and without decay.
    assert len(list_traces(lags)) == 6 + 3
    assert len(list_traces(by_pair)) == 2
    assert len(list_traces(taken)[-1]["text"]) == 6


def test_without_pairs_no_use_is_measured():
    given = build_subject("AM")
    batch = type(given.batch)(given.batch.inputs, given.batch.targets, given.batch.roles, {})
    results = frequencies.measure(Subject(TASK, given.model, batch))
    assert [type(r).__name__ for r in results] == [
        "Energies",
        "ScoresByLag",
        "FrequenciesByLag",
        "BandAblations",
    ]
    assert isinstance(results[1], ScoresByLag)
    assert results[1].layers[0].carried == {}


@pytest.mark.parametrize(
    ("stack", "options"),
    [("NM", {}), ("AM", {"A.position": "none"}), ("SM", {"S.position": "conv"})],
)
def test_where_nothing_rotates_nothing_is_measured(stack, options):
    with pytest.raises(NotApplicableError, match="at which frequencies it rotates"):
        frequencies.measure(build_subject(stack, options))

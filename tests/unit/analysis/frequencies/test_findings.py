"""Every finding has words, a figure and a record."""

import json
import math

import numpy as np
import pytest

from analysis import frequencies
from analysis.base import NotApplicableError, Subject
from analysis.frequencies.axes import find_cell_edges
from analysis.frequencies.bands import BandAblations
from analysis.frequencies.energies import Energies
from analysis.frequencies.frequencies_by_lag import FrequenciesByLag
from analysis.frequencies.scores_by_lag import ScoresByLag
from analysis.frequencies.uses import FrequencyUses
from analysis.plain import to_plain
from tests.unit.analysis.frequencies.models import (
    TASK,
    build_subject,
)


def list_traces(fig):
    """Return what a figure draws."""
    assert fig is not None
    return fig.to_dict()["data"]


def test_a_model_of_both_kinds_is_measured_described_and_drawn():
    given = build_subject("SM AM", {"S.d_state": 8}, rows=10, double=False)
    results = frequencies.measure(given)
    energies, uses, lags, by_pair, taken = results
    assert isinstance(energies, Energies)
    assert isinstance(uses, FrequencyUses)
    assert isinstance(lags, ScoresByLag)
    assert isinstance(by_pair, FrequenciesByLag)
    assert isinstance(taken, BandAblations)
    assert len(list_traces(frequencies.draw(by_pair))) == 2
    assert [(s.layer, s.sides) for s in energies.layers] == [(0, "C/B"), (1, "Q/K")]
    assert [(u.edge, u.layer) for u in uses.layers] == [
        ("query → value", 0),
        ("query → value", 1),
        ("value → key", 0),
        ("value → key", 1),
    ]
    json.dumps(to_plain(results))
    for result in results:
        words = frequencies.describe(result)
        assert words.title
        assert words.says.endswith(".")
        assert words.says in words.alt
    maps = [trace["z"]["shape"] for trace in list_traces(frequencies.draw(energies))]
    assert maps == ["1, 4", "4, 4"]
    # Panels have all pairs and two kinds of edges; those of C/B each with and without decay.
    assert len(list_traces(frequencies.draw(lags))) == 6 + 3
    assert len(list_traces(frequencies.draw(taken))[1]["y"]) == 6


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


def test_cells_end_midway_between_wavelengths():
    ends = find_cell_edges(np.array([10.0, 1000.0]))
    np.testing.assert_allclose(ends, [1, 100, 10_000])
    assert find_cell_edges(np.array([10.0])).tolist() == pytest.approx(
        [10 / math.e**0.5, 10 * math.e**0.5]
    )

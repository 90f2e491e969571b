"""Erratum T1: what the tables add up to."""

import pytest

from lab.errata.tables import AVERAGES, CEVAL, CEVAL_AVERAGES, count_strictly_best
from tests.paper.conftest import Run


@pytest.mark.parametrize(
    ("model", "mean", "sound"),
    [
        ("Llama-320M", 44.01, False),
        ("Mamba2-320M", 43.05, False),
        ("Jamba-320M", 44.29, False),
        ("Cheems-320M", 45.22, True),
        ("Llama-1.3B", 50.37, True),
        ("Mamba2-1.3B", 49.15, False),
        ("Jamba-1.3B", 51.04, False),
        ("Cheems-1.3B", 52.40, False),
    ],
)
def test_t1_averages(model: str, mean: float, sound: bool, erratum: Run):
    """Scores and average are rounded to 0.01, so 0.01 may lie between them, no more."""
    scores, printed = AVERAGES[model]
    hundredths = sum(round(100 * score) for score in scores)
    assert len(scores) == 7
    assert hundredths / 700 == pytest.approx(mean, abs=0.005)
    assert (abs(hundredths - 700 * printed) <= 7 + 1e-6) == sound
    named = f"{model} " in erratum("T1").printed_evidence
    assert named == (not sound)


def test_t1_mamba2(erratum: Run):
    assert AVERAGES["Mamba2-1.3B"][1] == 49.07
    found = erratum("T1")
    assert "Mamba2-1.3B averages 49.15, not 49.07" in found.printed_evidence


def test_cdmoe_is_not_best_on_all_tasks(erratum: Run):
    """Strictly best, tied for best, beaten: of 52 tasks."""
    assert len(CEVAL) == 52
    found = []
    for start in (0, 3):
        leads = [row[start + 2] - max(row[start : start + 2]) for row in CEVAL.values()]
        found.append([sum(f(lead) for lead in leads) for f in (is_ahead, is_level, is_behind)])
    assert found == [[33, 7, 12], [41, 3, 8]]
    assert (count_strictly_best(0), count_strictly_best(5)) == (33, 41)
    assert "33 of 52 tasks zero-shot and on 41" in erratum("T1").printed_evidence


def is_ahead(lead: float) -> bool:
    return lead > 0


def is_level(lead: float) -> bool:
    return lead == 0


def is_behind(lead: float) -> bool:
    return lead < 0


@pytest.mark.parametrize("column", range(6))
def test_the_averages_of_ceval_are_right(column: int):
    mean = sum(row[column] for row in CEVAL.values()) / 52
    assert mean == pytest.approx(CEVAL_AVERAGES[column], abs=0.005)

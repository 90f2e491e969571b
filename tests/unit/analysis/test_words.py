"""Numbers that stand together, and the first sentence or clause of a text and what is left."""

import pytest

from analysis.words import count_interval_decimals, percents, split_lead

LONG = "query rows put 84.9 % (uniform: 2.2 %) of their mass on the value they ask for; no more is"


@pytest.mark.parametrize(
    ("text", "lead", "rest"),
    [
        ("It is right. So it is.", "It is right.", "So it is."),
        ("Short: a label stays. More.", "Short: a label stays.", "More."),
        (f"It recalls: {LONG} known. More.", "It recalls.", f"Q{LONG[1:]} known. More."),
        (f"Query → value: {LONG}.", f"Query → value: {LONG}.", ""),
        (f"It holds: n=2 {LONG}. More.", "It holds.", f"n=2 {LONG}. More."),
        (f"Rows (a: b; c) {LONG}.", f"Rows (a: b; c) {LONG.split(';')[0]}.", "No more is."),
        ("Head 1.0 is sharp. “So” it is.", "Head 1.0 is sharp.", "“So” it is."),
    ],
)
def test_the_lead_is_one_sentence_or_clause(text, lead, rest):
    assert split_lead(text) == (lead, rest)


def test_shares_that_stand_together_have_the_same_decimals():
    assert percents(0.5, 0.25) == ["50.0 %", "25.0 %"]
    assert percents(0.994, 0.99902) == ["99.400 %", "99.902 %"]
    assert percents(0.0, 0.00094) == ["0.000 %", "0.094 %"]


@pytest.mark.parametrize(
    ("low", "high", "decimals"),
    [(0.9919, 0.9923, 2), (0.992, 0.9922, 2), (0.97, 0.98, 1), (0.0, 0.0, 1), (0.9999, 1.0, 3)],
)
def test_the_ends_of_an_interval_differ(low, high, decimals):
    assert count_interval_decimals(low, high) == decimals

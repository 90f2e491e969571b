import pytest

from lab.training.records import find_ending, name_ending


@pytest.mark.parametrize(
    ("result", "ending"),
    [
        (None, "unfinished"),
        ({"stopped": "solved", "signal": None}, "solved"),
        ({"stopped": "interrupted", "signal": "SIGINT"}, "interrupted"),
        ({"stopped": "interrupted", "signal": None}, "not solved: time limit reached"),
    ],
)
def test_minutes_and_signals_end_a_run_in_words_of_their_own(result, ending):
    assert name_ending(find_ending(result)) == ending

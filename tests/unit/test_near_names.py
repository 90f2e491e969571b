"""Near names: mistyped ones, other libraries' words, and neither."""

import pytest

from tasks.near_names import find_near, suggest

OPTIONS = ["--only", "--out", "--seq-len", "--precision", "--learning-rate", "--max-steps"]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("--seqlen", ["--seq-len"]),
        ("--SEQ_LEN", ["--seq-len"]),
        ("--run-dir", ["--out"]),
        ("dtype", ["--precision"]),
        ("--laws", ["--only"]),
        ("--qqq", []),
    ],
)
def test_a_name_is_near_what_it_may_stand_for(name, near):
    assert find_near(name, OPTIONS) == near


def test_a_suggestion_asks_or_lists():
    assert suggest("lr", ["learning_rate", "seed"]) == "Did you mean learning_rate?"
    assert suggest("lr", ["seed", "stack"]) == "Known: seed, stack"
    assert suggest("", iter(["one", "two"])) == "Known: one, two"

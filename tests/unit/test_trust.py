"""What a file of someone else names is not used unless the user names it, too."""

import pytest

from lab.trust import ask_for_trust, list_named


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, []),
        ({"model": {"model": None}, "task": {"path": None}}, []),
        ({"model": {"model": "mine:Mixer"}}, ["import and run mine:Mixer"]),
        ({"task": {"path": "/a/text"}, "model": 3}, ["read the text /a/text"]),
    ],
)
def test_what_a_config_names(config, named):
    assert list_named(config) == named


def test_the_way_to_allow_it_is_said():
    said = ask_for_trust("runs/x", ["import and run mine:Mixer", "read the text /a"])
    assert said == (
        "runs/x: would import and run mine:Mixer and read the text /a, which you have not named; "
        "--trust allows that"
    )

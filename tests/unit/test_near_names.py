"""Near names: mistyped ones, other libraries' words, and neither."""

from dataclasses import fields

import pytest

from lab.config import ModelConfig, Runtime, TrainConfig
from tasks.mqar import MQAR
from tasks.near_names import SYNONYMS, find_near, suggest

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


def test_each_synonym_stands_for_an_option_and_is_none_itself():
    known = {f.name for part in (MQAR, ModelConfig, TrainConfig, Runtime) for f in fields(part)}
    assert {*SYNONYMS.values()} <= known | {"out", "config", "only"}
    assert not {*SYNONYMS} & known

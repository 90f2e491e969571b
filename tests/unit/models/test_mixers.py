"""The mixers that a stack names by word: their states' sizes, their options, the command."""

import json

import pytest
from typer.testing import CliRunner

from lab.cli.app import app
from lab.layers.attention import Attention
from lab.models import CLASSES, MIXERS, build
from lab.models.mixers import list_options, measure_state, summarize_mixers


def test_every_letter_and_every_word_is_a_mixer():
    named = {kind.letter or name: kind.cls for name, kind in MIXERS.items()}
    assert named == {name: cls for name, cls in CLASSES.items() if cls is not None}
    assert all(name.isalnum() and name.islower() and len(name) > 1 for name in MIXERS)


@pytest.mark.parametrize("name", MIXERS)
def test_a_word_builds_its_class(name):
    model = build(f"{name}+N", vocab_size=8, d_model=16, n_heads=2)
    assert type(model.list_blocks()[0].mixer) is MIXERS[name].cls


def test_states_are_measured():
    found = {summary.name: summary for summary in summarize_mixers(32, 2)}
    # A key and a value a token; a state of d_state = 128 numbers a channel.
    assert (found["attention"].fixed_bytes, found["attention"].token_bytes) == (0, 2 * 32 * 4)
    assert (found["ssd"].fixed_bytes, found["ssd"].token_bytes) == (128 * 32 * 4, 0)
    # A bias a head and a token with a mask; one head of keys halves the rest.
    assert measure_state(Attention(32, 2, n_kv_heads=1, mask="value"), 32) == (0, (2 * 16 + 1) * 4)


def test_options_have_defaults_and_values():
    found = list_options(Attention)
    assert found["position"] == {"default": "rope", "values": ("rope", "none")}
    assert found["window"] == {"default": None}
    assert "d_model" not in found


def test_the_command_lists_them():
    run = CliRunner()
    shown = run.invoke(app, ["mixers"]).output
    assert all(f"\n{name}" in shown for name in MIXERS)
    assert "32,768" in shown
    lines = run.invoke(app, ["mixers", "--json", "--d-model", "32"]).output.splitlines()
    assert [json.loads(line)["name"] for line in lines] == list(MIXERS)
    assert "position = rope | conv | decay | none" in run.invoke(app, ["mixers", "ssd"]).output
    refused = run.invoke(app, ["mixers", "sdd"])
    assert refused.exit_code == 2
    assert "name='sdd': must be one of" in refused.output
    assert "Did you mean ssd?" in refused.output
    assert "must be a positive multiple" in run.invoke(app, ["mixers", "--n-heads", "5"]).output

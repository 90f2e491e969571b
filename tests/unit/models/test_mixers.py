"""The mixers that a stack names by word: their states' sizes, their options, the command."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from lab.cli.app import app
from lab.layers.attention import Attention
from lab.models import CLASSES, MIXERS, Block, build
from lab.models.mixers import list_options, split_state, summarize_mixers


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
    assert split_state(Attention(32, 2, n_kv_heads=1, mask="value"), 32) == (0, (2 * 16 + 1) * 4)


@pytest.mark.parametrize("name", MIXERS)
@torch.no_grad()
def test_the_bytes_of_a_state_are_what_decoding_carries(name):
    sizes: Any = {"vocab_size": 8, "d_model": 16, "n_heads": 2}
    model = build(f"{name}+N N+M {name}+M", **sizes)
    state: Any = model.start(1)
    carried = {}
    for n in range(1, 71):  # more than the window's 64
        _, state = model.step(torch.zeros(1, dtype=torch.long), state)
        held = [part for each in state.blocks if each is not None for part in tuple(each)[:-1]]
        carried[n] = sum(part.nbytes for part in held if isinstance(part, Tensor))
    with torch.device("meta"):
        shapes = build(f"{name}+N N+M {name}+M", **sizes)
    for n in (1, 9, 70):
        assert model.state_bytes(n) == shapes.state_bytes(n) == carried[n] > 0


class Plain(nn.Module):
    """A user's mixer that only maps a sequence."""

    def __init__(self, d_model: int):
        super().__init__()
        self.map = nn.Linear(d_model, d_model)

    def forward(self, x):
        return self.map(x)


class Summing(Plain):
    """A user's mixer whose state is a dictionary, and that looks at what it reads."""

    def start(self, batch, position=0):
        return {"sum": torch.zeros(batch, 3), "count": torch.zeros(batch, dtype=torch.int64)}

    def prefill(self, x, state=None, keep=None):
        if x.sum().item() > 1e9:
            raise ValueError("too large")
        return self(x), self.start(len(x)) if state is None else state

    def step(self, x, state):
        return self(x), state


class Broken(Summing):
    """A user's mixer whose decoding has a fault."""

    def prefill(self, x, state=None, keep=None):
        raise KeyError("sum")


class Telling(Plain):
    """A user's mixer that gives the size of its state."""

    def state_bytes(self, length):
        return 4 * length if length < 100 else -1.5


@pytest.mark.parametrize(
    ("mixer", "length", "found"),
    [
        (Plain, 7, "Plain has neither state_bytes nor start, prefill and step"),
        (Summing, 7, 3 * 4 + 8),
        (Broken, 7, "Broken raised KeyError: 'sum'"),
        (Telling, 7, 28),
        (Telling, 100, r"Telling.state_bytes\(100\) is -1.5, must be an integer ≥ 0"),
        (Telling, 0, "length=0 must be at least 1"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_users_mixer_tells_its_state_or_it_is_counted_or_not_known(mixer, length, found, device):
    with torch.device(device):
        block = Block(4, mixer(4), None)
    if isinstance(found, int):
        assert block.state_bytes(length) == found
    else:
        with pytest.raises(ValueError, match=found):
            block.state_bytes(length)


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

"""A module of any class answers what a mixer is asked, once a block has it."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from lab.hooks import HookPoint
from lab.layers.attention import Attention
from lab.layers.mixer import NOT_OFFERED, MatrixMixer, Mixer, adapt
from lab.layers.ssd import SSD
from lab.layers.state import Decoder
from lab.models import Block


class Mean(nn.Module):
    def forward(self, x):
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


class Named(Mean):
    heads_hook = "hook_z"

    def __init__(self):
        super().__init__()
        self.hook_z = HookPoint()

    @property
    def rotary_pairs(self):
        raise RuntimeError("asked too early")

    def matrix(self, x, rows=None):
        raise NotImplementedError

    values = project = matrix


class Inheriting(Attention):
    """Has all that attention has, and its `forward` may rely on what changed."""


class Positions(Mean):
    def forward(self, x, at=None):
        raise NotImplementedError


def test_what_a_module_does_not_have_it_does_not_offer():
    module = Mean()
    before = module.state_dict(), [name for name, _ in module.named_modules()]
    found = Block(8, module, None).mixer
    assert found is module
    assert isinstance(found, Mixer)
    assert {name: getattr(found, name) for name in NOT_OFFERED} == NOT_OFFERED
    assert (module.state_dict(), [name for name, _ in module.named_modules()]) == before
    assert not isinstance(found, MatrixMixer | Decoder)


def test_what_a_module_has_stays():
    found = adapt(Named())
    assert (found.heads_hook, found.takes_rows, found.bias_hook) == ("hook_z", True, None)
    with pytest.raises(RuntimeError, match="asked too early"):
        _ = found.rotary_pairs


@pytest.mark.parametrize(
    ("module", "takes"),
    [
        (Attention(8), (True, True)),
        (SSD(8), (True, True)),
        (Inheriting(8), (True, False)),
        (Positions(), (False, True)),
        (nn.Identity(), (False, False)),
    ],
    ids=lambda case: type(case).__name__,
)
def test_what_a_method_takes_is_read_from_its_arguments(module, takes):
    found = adapt(adapt(module))
    assert (found.takes_rows, found.takes_positions) == takes


def test_a_mixer_that_takes_the_place_of_another_is_adapted():
    block: Any = Block(8, Attention(8), None)
    block.mixer = Named()
    assert block.mixer.heads_hook == "hook_z"
    block.mixer = None
    assert block.mixer is None


def test_an_adapted_module_is_copied_and_pickled_as_it_was():
    module = adapt(Mean())
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(copied) is Mean
        assert copied.heads_hook is None

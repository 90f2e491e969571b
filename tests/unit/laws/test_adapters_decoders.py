"""An adapter decodes from any state that the foreign module can continue from."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lab.laws import Certification, CertifySettings
from lab.laws.adaptation import adapt
from lab.laws.probes import draw
from lab.laws.tokens import BITS
from lab.layers.state import Decoder
from tests.unit.laws.foreign_decoders import (
    DECODERS,
    Cached,
    Going,
    Overwriting,
    OverwritingCache,
    OverwritingStep,
    ReturnedLate,
    Stubborn,
)
from tests.unit.laws.foreign_modules import relative_difference


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_goes_on_from_any_state_any_number_of_times(name: str):
    made, recipe = DECODERS[name]
    torch.manual_seed(0)
    found = adapt(made())
    assert found.recipe == recipe
    assert found.d_model == 8 + BITS * ("Tokens" in recipe)
    module = found.module.double().eval()
    assert isinstance(module, Decoder)
    x = draw((3, 9, found.d_model), 0)
    with torch.no_grad():
        y = module(x)
        state, steps = module.start(3), []
        for i in range(9):
            one, state = module.step(x[:, i], state)
            steps.append(one)
        assert relative_difference(torch.stack(steps, 1), y) < 1e-13
        assert state.position.tolist() == [9] * 3
        head, state = module.prefill(x[:, :4])
        before = copy.deepcopy(state)
        for _ in range(2):
            tail, end = module.prefill(x[:, 4:], state)
            assert relative_difference(torch.cat([head, tail], 1), y) < 1e-13
            assert end.position.tolist() == [9] * 3
    for mine, theirs in zip(list_tensors(state), list_tensors(before), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("made", [Overwriting, OverwritingStep])
def test_a_call_must_not_change_the_state_that_it_is_given(made: type[nn.Module]):
    found = Certification(made(), CertifySettings(8, (2, 5))).judge("prefill = step")
    assert found.verdict == "fails"
    assert found.counterexample == (
        "length 2: using the state after 1 tokens a second time moves output 1 of row 0"
    )


@pytest.mark.parametrize("make", [OverwritingCache, Going, lambda: Cached(0)])
def test_a_call_may_write_into_a_cache(make: Callable[[], nn.Module]):
    found = Certification(make(), CertifySettings(8, (2, 5))).judge("prefill = step")
    assert found.verdict == "holds"


def test_a_state_that_forward_returns_is_given_to_step():
    found = Certification(ReturnedLate(), CertifySettings(8, (2, 5))).judge("prefill = step")
    assert found.counterexample == (
        "length 3: splitting forward into prefills of 2 and 1 tokens moves output 2 of row 0"
    )


def test_a_step_that_cannot_be_called_leaves_decoding_undecided():
    found = Certification(Stubborn(8, 8), CertifySettings(8, (2, 5))).judge("prefill = step")
    assert found.verdict == "not decided"
    assert found.evidence.startswith("decodes with step, from None, but raised TypeError: Stubborn")


def list_tensors(state: object) -> list[Tensor]:
    return [x for x in tree_leaves(state) if isinstance(x, Tensor)]


@pytest.mark.parametrize("name", ["gru", "stepping", "returned"])
def test_padding_is_refused_where_no_mask_is_taken(name: str):
    module: Any = adapt(DECODERS[name][0]()).module
    assert module.paddings == ()
    keep = torch.ones(2, 5, dtype=torch.bool)
    module.prefill(torch.zeros(2, 5, 8), None, keep)
    keep[0, 0] = False
    with pytest.raises(ValueError, match="keep has padding"):
        module.prefill(torch.zeros(2, 5, 8), None, keep)


def test_relative_positions_are_undecided_where_the_module_is_not_told_the_first():
    settings = CertifySettings(8, (1, 5), max_len=64, relative=True)
    found = Certification(Going(), settings).judge("relative")
    assert found.verdict == "not decided"
    assert "position=1 must be 0: this module takes no first position" in found.evidence
    assert Certification(nn.GRU(8, 8), CertifySettings(8, (1, 5))).judge("relative").verdict == (
        "holds"
    )

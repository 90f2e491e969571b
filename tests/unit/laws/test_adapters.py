"""Foreign modules are called as they want to be, and come out as they went in."""

import copy

import pytest
import torch
from torch import nn

from lab.laws import adapters, tokens
from lab.laws.adaptation import adapt, find_lengths_taken
from lab.laws.probes import draw
from lab.laws.tokens import BITS
from lab.layers.state import Decoder
from tests.unit.laws.foreign_decoders import DECODERS, write_recipe
from tests.unit.laws.foreign_modules import CALLED, Chunked, Model, Returning, relative_difference


@pytest.mark.parametrize("name", CALLED)
def test_a_module_is_called_as_it_wants_to_be(name: str):
    made, recipe, called = CALLED[name]
    target = made()
    if isinstance(target, nn.Module):
        target.eval()
    found = adapt(target)
    assert found.recipe == recipe
    assert found.d_model == 8 + BITS * ("Tokens" in recipe)
    assert not isinstance(found.module, Decoder)
    x = draw((3, 16, found.d_model), 0).float()
    if "Tokens" in recipe:
        x[..., :-BITS] = 0  # which would move the embeddings
    with torch.no_grad():
        y, asked = found.module(x), called(target, x)
    assert y.shape[:2] == (3, 16)
    assert relative_difference(y, asked.reshape(y.shape)) < 1e-6


def test_what_was_found_is_said():
    assert adapt(nn.Conv1d(8, 6, 3, padding=1)).notes == (
        "reads vectors of width 8 (found by trying)",
        "takes features before time ([b d t])",
    )
    assert adapt(nn.GRU(8, 6), d_model=8).notes == (
        "takes time before batch ([t b d]), since its batch_first is False",
        "returns a tuple, of which item 0 is used",
        "decodes with its hidden state",
    )
    assert adapt(Model(400)).recipe == "Tokens(module, vocab_size=400, table='embed')"
    assert adapt(Model()).notes == ("reads tokens from a vocabulary of 32, embedded by embed",)


def test_options_decide():
    pair = Returning(lambda y: (y, -y))
    x = draw((2, 5, 8), 0).float()
    assert torch.equal(adapt(pair, output=1).module(x), -pair.linear(x))
    assert adapt(nn.GRU(8, 8), layout="btd").recipe == write_recipe(
        "advance_recurrent", "relative=True, positioned=True, output=0"
    )
    assert adapt(nn.GRU(8, 8), relative=False).recipe == (
        write_recipe("advance_recurrent", "relative=False, positioned=True, output=0, layout='tbd'")
    )
    assert adapt(torch.tanh, d_model=5).d_model == 5
    assert adapt(lambda ids: ids[..., None].double(), vocab_size=9, d_model=4).recipe == (
        "Tokens(Adapter(module), vocab_size=9, table=None)"
    )


def test_a_module_comes_out_as_it_went_in():
    target = nn.Sequential(nn.BatchNorm1d(8), nn.Conv1d(8, 8, 1))
    before = copy.deepcopy(target.state_dict())
    found = adapt(target)
    assert found.module.training
    assert all(torch.equal(x, before[name]) for name, x in target.state_dict().items())
    assert not adapt(target.eval()).module.training
    model = Model()
    adapt(model)
    assert not model.embed._forward_hooks


def test_lengths():
    taken, refused = find_lengths_taken(adapt(Chunked()).module, 8, (5, 16, 32), 3)
    assert taken == (16, 32)
    assert list(refused) == [5]
    assert refused[5].startswith("raised RuntimeError: ")


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        (nn.Bilinear(8, 8, 8), {}, "call Bilinear: .*'input2'; widths 8, 16, 64 .* d_model"),
        (nn.Linear(8, 4), {"d_model": 3}, r"given \[2, 5, 3\], it raised RuntimeError: mat1"),
        (nn.Conv1d(8, 8, 3, padding=2), {}, r"no floats \[b t …\], only \[2, 8, 7\] float32"),
        (Returning(lambda y: y.sum(1)), {}, r"returned no floats \[b t …\], only \[2, 6\] float32"),
        (
            Returning(lambda y: (y, y)),
            {"output": 2},
            "as output 2, only item 0 .* item 1",
        ),
        (Model(), {"input": "hidden"}, "with hidden inputs, .*indices"),
        (Model(), {"d_model": 5}, "d_model=5 must be 8, the width of embed"),
        (nn.Linear(8, 8), {"input": "tokens"}, "give it as vocab_size"),
        (nn.Linear(8, 8), {"input": "words"}, "input='words': must be one of"),
        (nn.Linear(8, 8), {"d_model": 0}, "d_model=0 must be at least 1"),
    ],
)
def test_what_is_not_understood_is_refused(target: nn.Module, options: dict, words: str):
    with pytest.raises(ValueError, match=words) as raised:
        adapt(target, **options)
    assert "\n" not in str(raised.value)


def test_a_recipe_makes_the_adapter():
    names = {**vars(adapters), **vars(tokens)}
    for name, (made, *_) in {**CALLED, **DECODERS}.items():
        torch.manual_seed(0)
        target = made()
        found = adapt(target)
        remade = eval(found.recipe, names | {"module": copy.deepcopy(target)})
        x = draw((2, 16, found.d_model), 0).float()
        assert torch.equal(remade.eval()(x), found.module.eval()(x)), name

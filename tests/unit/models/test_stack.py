"""Stack notation, per-layer options, and what `build` makes of them."""

from typing import Any

import pytest
import torch
from torch import nn

from lab.api.settings import describe_run
from lab.layers.attention import Attention
from lab.layers.ssd import SSD
from lab.models import CLASSES, TRANSFORMS, Block, build
from lab.models.architectures import describe_user_mixers
from lab.models.stack import LETTERS, parse_stack, read_as, split_options
from lab.training.catalog import list_changes


class Shift(nn.Module):
    """A user's mixer: each position sees the one before it."""

    def __init__(self, d_model: int, *, gain: float = 1.0, sign: bool = False):
        super().__init__()
        self.map = nn.Linear(d_model, d_model, bias=False)
        self.gain = -gain if sign else gain

    def forward(self, x):
        return self.gain * self.map(torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1))


class TwoHeads(nn.Module):
    """A user's mixer with a number of heads of its own."""

    def __init__(self, d_model: int, n_heads: int = 2):
        super().__init__()
        self.n_heads = n_heads

    def forward(self, x):
        return x


class AnyHeads(TwoHeads):
    """A user's mixer that must be given a number of heads."""

    def __init__(self, d_model: int, n_heads: int):
        super().__init__(d_model, n_heads)


def blocks(stack):
    return parse_stack(stack, CLASSES, TRANSFORMS)


def test_the_papers_stack():
    assert blocks("SE*7 IE") == [("S", "E")] * 7 + [("I", "E")]
    assert blocks("  AM   NM  AN ") == [("A", "M"), ("N", "M"), ("A", "N")]


def test_a_mixers_word_stands_for_its_letter():
    assert blocks("ssd+E*7 ifa+E") == blocks("SE*7 IE")
    assert blocks("attention+N A+N NM N+M") == [("A", "N")] * 2 + [("N", "M")] * 2
    options = {"ssd.d_state": 8, "S.skip": False, "1.ssd.d_state": 4}
    assert split_options(options, blocks("SM ssd+M")) == [
        ({"d_state": 8, "skip": False}, {}),
        ({"d_state": 4, "skip": False}, {}),
    ]


@pytest.mark.parametrize(
    ("stack", "message"),
    [
        ("", "must name at least one pair"),
        ("ZM", f"unknown mixer 'Z'; known: {', '.join(LETTERS.values())}, N"),
        ("AZ", "unknown transform 'Z'; known: M, E, R, X, P, N"),
        ("AMM", "'AMM' is not a pair"),
        ("A", "'A' is not a pair"),
        ("AM*", "is not a pair"),
        ("ssd", "'ssd' is not a pair such as 'AM', 'SE*7' or 'ssd+M'"),
        ("ssd+", "'ssd+' is not a pair"),
        ("ssd+Q", "unknown transform 'Q'; known: M, E, R, X, P, N"),
        ("sdd+M", "unknown mixer 'sdd'. Did you mean ssd?"),
        ("spectral+M", "unknown mixer 'spectral'. Known: attention, ssd, ifa, linear"),
        ("AM*0", "repeats 0 times, must be ≥ 1"),
        ("AM SM*1000", "repeats 1000 times, must be ≥ 1 and leave the stack at most 1000"),
    ],
)
def test_bad_stacks_are_named(stack, message):
    with pytest.raises(ValueError, match="stack=") as error:
        blocks(stack)
    assert message in str(error.value)


def test_a_mistyped_architecture_is_answered_with_the_known_names():
    for stack in ("cheemz", "Cheems", "CHEMS"):
        words = rf"stack='{stack}': must be pairs .* cheems, doge, .* Did you mean cheems\?"
        with pytest.raises(ValueError, match=words):
            build(stack, vocab_size=8, d_model=8)


def test_a_blocks_own_option_goes_before_its_letters():
    split = split_options({"1.A.mask": "soft", "A.mask": "value", "M.d_ff": 8}, blocks("AM*2 SE"))
    assert split == [
        ({"mask": "value"}, {"d_ff": 8}),
        ({"mask": "soft"}, {"d_ff": 8}),
        ({}, {}),
    ]


@pytest.mark.parametrize("key", ["mask", "A", "A.", "a.mask", "A.mask.x", "-1.A.mask", "A b.mask"])
def test_an_option_of_another_form_is_named(key):
    with pytest.raises(ValueError, match=r"must look like S\.d_state, ssd\.d_state or 1\.A\.mask"):
        split_options({key: 1}, blocks("AM"))


@pytest.mark.parametrize("key", ["S.d_state", "2.A.mask", "ssd.d_state", "sdd.d_state"])
def test_an_option_that_meets_no_layer_is_named(key):
    with pytest.raises(ValueError, match="the stack of 1 blocks has no such layer"):
        split_options({key: 1}, blocks("AM"))


def test_text_is_read_as_the_annotated_type():
    assert read_as(int, "7", "x") == 7
    assert read_as(float, "2", "x") == 2.0
    assert isinstance(read_as(float, 2, "x"), float)
    assert read_as(bool, "no", "x") is False
    assert read_as(int | None, "none", "x") is None
    assert read_as(int | None, "3", "x") == 3


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        (int, "2.5", "x=2.5: must be a whole number"),
        (float, "two", "x=two: must be a number"),
        (bool, "maybe", "x=maybe: must be true or false"),
        (int, True, "x=True: must be of type int"),
    ],
)
def test_a_value_of_another_type_is_named(annotation, value, message):
    with pytest.raises(ValueError, match=message):
        read_as(annotation, value, "x")


def test_options_reach_the_layers():
    model = build(
        "AM SM",
        vocab_size=32,
        d_model=16,
        n_heads=2,
        options={"S.d_state": "8", "A.mask": "soft", "A.n_heads": "4", "M.d_ff": 24},
    )
    first, second = model.blocks
    assert isinstance(first, Block)
    assert isinstance(second, Block)
    assert isinstance(first.mixer, Attention)
    assert first.mixer.n_heads == 4
    assert first.mixer.mask is not None
    assert isinstance(second.mixer, SSD)
    assert second.mixer.B_proj.out_features == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"A.masc": "soft"}, "unknown option A.masc. Did you mean mask?"),
        ({"A.mask": "hard"}, "A.mask='hard': must be one of none, literal"),
        ({"A.rope_base": "x"}, "A.rope_base=x: must be a number"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match="A\\.") as error:
        build("AM", vocab_size=32, d_model=16, options=options)
    assert message in str(error.value)


def test_none_is_no_layer():
    model = build("NN", vocab_size=32, d_model=16)
    assert not list(model.blocks.parameters())
    with pytest.raises(ValueError, match=r"option N\.x: N is not a layer"):
        build("NM", vocab_size=32, d_model=16, options={"N.x": 1})


def test_a_users_mixer_is_the_letter_u():
    model = build(
        "UM AM",
        vocab_size=32,
        d_model=16,
        model="tests.unit.models.test_stack:Shift",
        options={"U.gain": "2", "U.sign": "yes"},
    )
    block = model.blocks[0]
    assert isinstance(block, Block)
    assert type(block.mixer).__name__ == "Shift"
    assert getattr(block.mixer, "gain", None) == -2.0
    assert model(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 32)


@pytest.mark.parametrize(
    ("mixer", "given", "heads"),
    [
        ("TwoHeads", {}, (2, 1)),
        ("TwoHeads", {"n_heads": 1}, (1, 1)),
        ("TwoHeads", {"n_heads": 4}, (4, 4)),
        ("TwoHeads", {"n_heads": 4, "options": ["U.n_heads=8"]}, (8, 4)),
        ("AnyHeads", {}, (1, 1)),
    ],
)
def test_a_users_mixer_keeps_its_heads_unless_asked(mixer, given, heads, tmp_path):
    path = f"tests.unit.models.test_stack:{mixer}"
    given = {**given, "model": path, "stack": "UN AN"}
    run, _ = describe_run("mqar", given | {"seq_len": 16, "vocab_size": 32}, tmp_path)
    found: Any = [block.mixer for block in run.build().list_blocks()]
    assert tuple(mixer.n_heads for mixer in found) == heads
    assert describe_user_mixers(run.model) == [f"{path} in block 0: n_heads={heads[0]}"]
    assert list_changes(run).get("n_heads") == given.get("n_heads")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("Shift", "must look like package.module:Class"),
        ("no.such.module:Shift", "No module named 'no'"),
        ("tests.unit.models.test_stack:Missing", "has no attribute 'Missing'"),
        ("tests.unit.models.test_stack:blocks", "must be a subclass of torch.nn.Module"),
    ],
)
def test_a_bad_model_path_is_named(path, message):
    with pytest.raises(ValueError, match="model=") as error:
        build("UM", vocab_size=32, d_model=16, model=path)
    assert message in str(error.value)


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = build("AM SE IM", vocab_size=32, d_model=16, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = build("AM SE IM", vocab_size=32, d_model=16, seed=3)
    other = build("AM SE IM", vocab_size=32, d_model=16, seed=4)
    pairs = list(zip(one.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not torch.equal(one.embed.weight, other.embed.weight)


def test_tied_and_frozen_tables():
    tied = build("AM", vocab_size=32, d_model=16, train_embedding=False)
    assert tied.head.weight is tied.embed.weight
    assert not tied.embed.weight.requires_grad
    loose = build("AM", vocab_size=32, d_model=16, tied=False)
    assert loose.parameter_count() == tied.parameter_count() + 32 * 16


def test_an_unannotated_option_is_read_as_its_defaults_type():
    model = build(
        "UM",
        vocab_size=32,
        d_model=16,
        model="tests.integration.mixers:Good",
        options={"U.width": "8"},
    )
    block = model.blocks[0]
    assert isinstance(block, Block)
    assert getattr(block.mixer, "width", None) == 8

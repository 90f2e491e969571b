"""Weights set by hand: mqar and induction, by every mixer able to."""

import pytest
import torch

from lab.config import ModelConfig
from lab.constructions import CannotError, construct
from lab.constructions.cannot import count_arrangement_bits
from lab.constructions.codes import Channels, compare_spread_codes, spread, welch
from lab.constructions.match import SuperposedMemory
from lab.models.evaluation import evaluate
from lab.models.language_model import LanguageModel
from lab.ops.rope import rotate
from tasks.base import Task
from tasks.induction import Induction
from tasks.mqar import MQAR

MASKS = ("none", "literal", "straight-through", "soft", "value", "oracle")
RECALL = MQAR(seq_len=64, vocab_size=256)
FEW = MQAR(seq_len=16, vocab_size=32)
"""So few keys that each has a channel of its own, at d_model 64."""
TRIGGER = Induction(seq_len=64)
CONV = {"S.position": "conv"}


def make_construction(task: Task, stack: str = "AM*2", **given: object) -> LanguageModel:
    """Return the construction; names that are no field of the model are options of its layers."""
    sizes = {
        n: given.pop(n) for n in ("d_model", "n_heads", "tied", "train_embedding") if n in given
    }
    options = {name.replace("__", "."): value for name, value in given.items()}
    return construct(task, ModelConfig(stack=stack, options=options, **sizes))  # type: ignore[arg-type]


def assert_solves(task: Task, model: LanguageModel, rows: int = 64) -> None:
    at_once = max(1, min(rows, 4096 // task.seq_len))
    reached = evaluate(task, model, rows=rows, rows_at_once=at_once, seed=0)
    assert reached.accuracy == 1
    assert 1e-4 < reached.loss < 0.05
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        assert parameter.abs().max() < 1000, name


@pytest.mark.parametrize("letter", "AI")
@pytest.mark.parametrize("mask", MASKS)
def test_attention_solves_mqar_under_every_open_mask(letter, mask):
    model = make_construction(RECALL, f"{letter}M*2", **{f"{letter}__mask": mask})
    assert_solves(RECALL, model)


@pytest.mark.parametrize("letter", "AI")
@pytest.mark.parametrize("mask", MASKS)
def test_attention_solves_induction_under_every_open_mask(letter, mask):
    model = make_construction(TRIGGER, f"{letter}M*2", **{f"{letter}__mask": mask})
    assert_solves(TRIGGER, model)


@pytest.mark.parametrize(
    "given",
    [
        {"n_heads": 2},
        {"n_heads": 4, "A__n_kv_heads": 2},
        {"n_heads": 4, "A__n_kv_heads": 1},
        {"A__rope_layout": "interleaved"},
        {"1.A.position": "none"},
        {"A__d_value": 16},
        {"A__mask": "soft", "A__window": 64},
        {"tied": False},
        {"train_embedding": False},
        {"d_model": 16},
        {"stack": "IM*2", "n_heads": 2},
        {"stack": "IM*2", "I__retrieval": "literal", "I__n_values": 4, "I__k": 2},
        {"stack": "IM*2", "I__retrieval": "sigmoid"},
        {"stack": "IM*2", "I__retrieval": "straight-through", "I__key_init": "zeros"},
        {"stack": "IM*2", "I__value_map": "linear", "I__d_value": 32},
        {"stack": "SM AM"},
        {"stack": "SM AM", "S__position": "decay", "S__skip": False},
        {"stack": "SM AM", "S__gate": "silu", "S__dt_init": "paper"},
        {"stack": "SE IE", "I__mask": "value"},
        {"stack": "NE AX NN AR"},
        {"stack": "AP IM AN"},
        {"stack": "SM", **CONV},
        {"stack": "SN", **CONV, "n_heads": 4, "S__n_groups": 2, "S__gate": "silu"},
        {"stack": "SN", **CONV, "S__d_state": 256, "task": MQAR(seq_len=64, vocab_size=512)},
        {"stack": "mamba2"},
        {"stack": "cheems"},
        {"stack": "llama", "n_heads": 2},
    ],
    ids=str,
)
def test_mqar_is_solved(given):
    task = given.get("task", RECALL)
    assert_solves(task, make_construction(task, **{n: v for n, v in given.items() if n != "task"}))


@pytest.mark.parametrize("fillers", ["any", "fresh", "zero"])
@pytest.mark.parametrize("mask", ["none", "oracle"])
def test_the_earliest_of_several_keys_is_read_where_slots_are_empty(fillers, mask):
    task = MQAR(seq_len=64, vocab_size=66, n_pairs=8, fillers=fillers)
    assert_solves(task, make_construction(task, A__mask=mask))


def test_a_mixture_of_lengths_is_solved():
    task = MQAR(seq_len=(16, 64), vocab_size=256)  # type: ignore[arg-type]
    assert_solves(task, make_construction(task))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"S__position": "decay"},
        {"n_heads": 2, "S__n_groups": 2, "S__skip": False},
        {"0.S.position": "decay", "1.S.position": "none", "1.S.gate": "norm"},
        {"S__dt_init": "paper", "S__rope_layout": "interleaved"},
        {"0.S.position": "conv"},
        {"stack": "SN", **CONV},
    ],
    ids=str,
)
def test_an_ssd_solves_mqar_of_few_keys(given):
    assert_solves(FEW, make_construction(FEW, **{"stack": "SM*2", **given}))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"S__position": "decay"},
        {"S__position": "decay", "S__skip": False},
        {"S__gate": "silu", "S__dt_init": "paper"},
        {"0.S.position": "decay", "1.S.position": "none", "1.S.gate": "norm"},
        {"n_heads": 2, "S__n_groups": 2, "S__rope_layout": "interleaved"},
        {"stack": "NM SM NM SM"},
        {"fillers": "fresh"},
    ],
    ids=str,
)
def test_an_ssd_solves_mqar_of_more_keys_than_channels(given):
    given = {"stack": "SM*2", **given}
    task = MQAR(seq_len=64, vocab_size=256, fillers=given.pop("fillers", "any"))
    assert_solves(task, make_construction(task, **given))


def test_an_ssd_solves_mqar_of_the_defaults_at_the_width_that_its_refusal_names():
    task = MQAR(seq_len=256)
    with pytest.raises(CannotError, match=r"up to 100 % .* d_model=190 with d_state=94") as refused:
        make_construction(task, "SM*2", S__position="decay")
    assert not refused.value.proven
    model = make_construction(task, "SM*2", d_model=190, S__position="decay", S__d_state=94)
    assert_solves(task, model)


@pytest.mark.parametrize("width", [10, 16, 24])
def test_a_sum_misses_no_more_answers_than_its_bound(width, monkeypatch):
    monkeypatch.setattr("lab.constructions.match.ALLOWED", 1)
    model = make_construction(RECALL, "SM*2", d_model=2 + 2 * width, S__position="decay")
    missed = 1 - evaluate(RECALL, model, rows=64, rows_at_once=64, seed=0).accuracy
    writes = 31  # the other pairs, and a filler that is an answer behind each query at most
    bound = SuperposedMemory(128, 128, writes).bound_misses(width, width)
    assert bound / 100 < missed < bound
    assert SuperposedMemory(128, 128, writes).bound_misses(128, 128) == 0
    assert SuperposedMemory(128, 128, writes).bound_misses(width, width, own=0.7) >= bound


@pytest.mark.parametrize("stack", ["AM*2", "IM*2", "SM*2", "SM IM"])
@pytest.mark.parametrize("seq_len", [128, 4096])
def test_induction_is_solved_at_any_length_that_rotation_bears(stack, seq_len):
    task = Induction(seq_len=seq_len)
    assert_solves(task, make_construction(task, stack), rows=2)


def test_without_rotation_the_match_bears_any_length():
    task = Induction(seq_len=2**15)
    with pytest.raises(CannotError, match="seq_len=32768: a state of d_state=128 has 0 channels"):
        make_construction(task, "SM*2")
    assert_solves(task, make_construction(task, "SM*2", S__position="decay"), rows=1)


@pytest.mark.parametrize(
    ("task", "given", "words", "proven"),
    [
        (RECALL, {"A__position": "none"}, "past as a set", False),
        (RECALL, {"stack": "SM*2", "S__position": "none"}, "sums its past in no order", False),
        (RECALL, {"stack": "AM"}, "one mixer in the stack", False),
        (RECALL, {"stack": "NM"}, "no mixer in the stack", True),
        (RECALL, {"A__mask": "soft", "A__window": 8}, "window=8: .* hides 56 of 64", False),
        (RECALL, {"A__mask": "soft", "A__max_seq_len": 32}, "max_seq_len=32: must be ≥", True),
        (RECALL, {"n_heads": 16}, "a head of 4 channels .* slow enough", False),
        (RECALL, {"d_model": 4, "1.A.position": "none"}, "d_model=4: leaves 1 channels", False),
        (RECALL, {"stack": "SN", **CONV, "S__d_state": 64}, "S.d_state=64: 128 one-hot", False),
        (RECALL, {"stack": "SN", **CONV, "S__conv_width": 1}, "conv_width=2 would work", True),
        (
            RECALL,
            {"stack": "SM*2", "S__activation": "silu"},
            "S.activation=silu: no construction is built with S.position=rope",
            False,
        ),
        (
            RECALL,
            {"stack": "SN", "S__position": "conv", "S__activation": "none"},
            "S.activation=none: no construction is built with S.position=conv",
            False,
        ),
        (
            RECALL,
            {"stack": "SM*2", "S__gate": "norm"},
            "by hand .*: S.gate=norm does not work in",
            False,
        ),
        (
            MQAR(seq_len=64, vocab_size=256, n_pairs=8),
            {"stack": "SN", **CONV},
            "by hand .*: a sum over all matches cannot prefer the earliest",
            False,
        ),
        (
            MQAR(seq_len=512),
            {},
            "4096 keys apart in 10 of 64 channels.*position=none for that block",
            False,
        ),
        (
            MQAR(seq_len=256),
            {"stack": "SM*2", "d_model": 4, "S__d_state": 2},
            "the states hold 16 numbers of 32 bits, and the answers of a row take 767 bits",
            True,
        ),
    ],
    ids=str,
)
def test_what_cannot_is_refused_with_its_bound(task, given, words, proven):
    with pytest.raises(CannotError, match=words) as refused:
        make_construction(task, **given)
    assert refused.value.proven is proven
    assert "\n" not in str(refused.value)


def test_unused_layers_add_exactly_nothing():
    model = make_construction(RECALL, "NE AX NR AP")
    tokens = RECALL.batch(size=2).inputs
    _, cache = model.run_with_cache(tokens)
    for i in range(4):
        assert torch.equal(
            cache[f"blocks.{i}.hook_resid_mid"], cache[f"blocks.{i}.hook_resid_post"]
        )


def test_the_gathered_key_is_the_one_before():
    model = make_construction(RECALL)
    tokens = RECALL.batch(size=8).inputs
    with torch.no_grad():
        pattern = model.run_with_cache(tokens)[1]["blocks.0.mixer.hook_pattern"]
    previous = pattern[:, 0].diagonal(offset=-1, dim1=1, dim2=2)
    assert previous.min() > 0.999


def test_the_weights_depend_on_the_seed_only_where_they_are_not_set():
    first, second = (construct(RECALL, ModelConfig(), seed=seed) for seed in (0, 1))
    assert torch.equal(first.embed.weight, second.embed.weight)
    own = [model.get_submodule("blocks.0.mlp.up").weight for model in (first, second)]
    assert not torch.equal(*own)  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "width"), [(5, 8), (127, 18), (255, 24), (1500, 20)])
def test_codes_are_units_and_no_better_than_welch(count, width):
    codes = spread(count, width)
    torch.testing.assert_close(codes.norm(dim=1), torch.ones(count).double())
    alike = compare_spread_codes(count, width)
    largest = max(alike.highest, -alike.lowest)
    assert largest == pytest.approx((codes @ codes.T).fill_diagonal_(0).abs().max().item())
    assert welch(count, width) <= largest + 1e-12
    if width < count <= 1024:
        assert largest < 2 * welch(count, width)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_turned_codes_are_what_rotation_makes_of_them(layout):
    channels = Channels(16, layout, 100.0, "a head")
    codes, places = spread(9, 5), (15, 3, 8, 6, 0)
    whole = torch.zeros(1, 9, 1, 16).double()
    whole[0, :, 0, list(places)] = codes
    # A query at 11 and keys at 4.
    query, key = (rotate(whole, torch.full((9,), at), 100.0, layout)[0, :, 0] for at in (11, 4))
    torch.testing.assert_close(query @ key.T, codes @ channels.turn(codes, places, 7.0).T)


def test_arrangements_are_counted():
    assert count_arrangement_bits(5, 2) == pytest.approx(torch.tensor(20.0).log2().item())

"""Parity: what an SSD and an MLP can, and why softmax attention cannot."""

import pytest
import torch
from torch import nn

from lab.constructions import CannotError
from lab.constructions.parity import TOLERANCE
from lab.models import build
from tasks.word_problem import WordProblem
from tests.unit.constructions.test_recall import assert_solves, make_construction

PARITY = WordProblem(group="Z2", seq_len=64)


@pytest.mark.parametrize("position", ["rope", "conv", "decay", "none"])
def test_an_ssd_counts_and_an_mlp_bends_the_count(position):
    assert_solves(PARITY, make_construction(PARITY, "SM*2", S__position=position))


@pytest.mark.parametrize(
    "given",
    [
        {"stack": "SE"},
        {"stack": "SX", "n_heads": 4},
        {"stack": "AM SN NM"},
        {"stack": "SM", "M__activation": "relu", "M__gated": True},
        {"stack": "SM", "M__activation": "gelu", "S__gate": "silu", "S__skip": False},
        {"stack": "SM", "S__dt_init": "paper", "d_model": 6, "M__d_ff": 65},
    ],
    ids=str,
)
def test_parity_is_solved(given):
    assert_solves(PARITY, make_construction(PARITY, **given))


def test_rows_are_as_long_as_the_hidden_layer_bears():
    task = WordProblem(group="Z2", seq_len=255)
    assert_solves(task, make_construction(task, "SM"))


def test_the_count_is_right_to_the_tolerance():
    model = make_construction(PARITY, "SM", S__position="rope")
    ones = torch.ones(1, 64, dtype=torch.int64)
    _, cache = model.run_with_cache(ones)
    added = cache["blocks.0.hook_resid_mid"] - cache["blocks.0.hook_resid_pre"]
    count = added[0, :, 5] * 64 / cache["blocks.0.hook_resid_pre"][0, 0, 0]
    assert (count - torch.arange(1, 65)).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("task", "given", "words", "proven"),
    [
        (PARITY, {}, "averages equal values, at any depth", True),
        (PARITY, {"stack": "IE*2", "I__mask": "value"}, "averages equal values", True),
        (PARITY, {"A__mask": "oracle"}, "stores no pairs", True),
        (PARITY, {"stack": "NM"}, "no mixer", True),
        (PARITY, {"stack": "SN"}, "no MLP behind the SSD: .*Grazzi", False),
        (PARITY, {"stack": "NM SN"}, "no MLP behind the SSD", False),
        (PARITY, {"stack": "SM", "M__d_ff": 64}, "d_ff=64: .* takes d_ff ≥ 65", False),
        (
            PARITY,
            {"stack": "SM", "S__gate": "norm"},
            "by hand .*: S.gate=norm: the norm",
            False,
        ),
        (PARITY, {"stack": "SM", "S__rope_base": 100.0}, "seq_len=64: the slowest pair", False),
        (PARITY, {"stack": "SM", "d_model": 4}, "d_model=4: 6 channels are needed", False),
        (WordProblem(), {}, "averages equal values", True),
        (
            WordProblem(),
            {"stack": "SM"},
            "by hand .*: group=A5: .*unless TC0 = NC1",
            False,
        ),
        (WordProblem(group="Z60"), {"stack": "SM"}, "by hand .*: group=Z60", False),
    ],
    ids=str,
)
def test_what_cannot_is_refused_with_its_bound(task, given, words, proven):
    with pytest.raises(CannotError, match=words) as refused:
        make_construction(task, **given)
    assert refused.value.proven is proven


@torch.no_grad()
def _at_random(stack: str, options: dict[str, object]) -> nn.Module:
    model = build(stack, vocab_size=2, d_model=16, n_heads=2, options=options).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator))
    return model


def _apart(model: nn.Module) -> float:
    """Return how much positions differ in what they answer on rows of one token, beside all."""
    with torch.no_grad():
        logits = model(torch.arange(2)[:, None].expand(2, 40))
    return ((logits - logits[:, :1]).abs().max() / logits.abs().max()).item()


@pytest.mark.parametrize(
    ("stack", "options"),
    [
        ("AM*3", {}),
        ("AM*3", {"A.mask": "literal"}),
        ("AM*3", {"A.mask": "soft", "A.window": 3}),
        ("AN*2", {"A.mask": "value", "A.position": "none"}),
        ("AX AE", {"A.mask": "straight-through"}),
        ("IM*2", {"I.mask": "soft"}),
        ("IE*2", {"I.mask": "value", "I.retrieval": "sigmoid"}),
    ],
    ids=str,
)
def test_on_a_row_of_one_token_attention_answers_alike_everywhere(stack, options):
    assert _apart(_at_random(stack, options)) < 1e-5


@pytest.mark.parametrize("stack", ["SM", "AM SM"])
def test_on_a_row_of_one_token_an_ssd_does_not(stack):
    assert _apart(_at_random(stack, {})) > 1e-2

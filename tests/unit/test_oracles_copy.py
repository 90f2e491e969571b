"""Weights set by hand: copies."""

import pytest

from lab.oracles import CannotError
from tasks.copying import Copy
from tests.unit.test_oracles_recall import assert_solves, oracle

ONCE = Copy(seq_len=64, repeats=False)
"""Strings of 6 … 32 tokens, none twice."""
FIXED = Copy(seq_len=64, shortest=32)
SUFFIX = Copy(seq_len=64, mode="suffix", repeats=False)
MASKS = ("none", "literal", "straight-through", "soft", "value", "oracle")


@pytest.mark.parametrize("letter", "AI")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("task", [ONCE, FIXED], ids=["once", "fixed"])
def test_attention_copies_under_every_open_mask(task, letter, mask):
    assert_solves(task, oracle(task, f"{letter}M*2", **{f"{letter}__mask": mask}))


@pytest.mark.parametrize(
    ("task", "given"),
    [
        (ONCE, {"stack": "SM AM"}),
        (ONCE, {"stack": "SN", "S__position": "conv"}),
        (ONCE, {"n_heads": 2}),
        (Copy(repeats=False, vocab_size=128), {}),
        (SUFFIX, {}),
        (SUFFIX, {"1.A.position": "none"}),
        (SUFFIX, {"stack": "SX", "S__position": "conv", "S__gate": "norm"}),
        (Copy(seq_len=16, mode="suffix", repeats=False, vocab_size=17), {"stack": "SM*2"}),
        (FIXED, {"stack": "AM"}),
        (FIXED, {"stack": "IE", "n_heads": 4}),
        (Copy(shortest=100, vocab_size=512), {}),
    ],
    ids=str,
)
def test_a_copy_is_solved(task, given):
    assert_solves(task, oracle(task, **given))


@pytest.mark.parametrize(
    ("task", "given", "words", "proven"),
    [
        (Copy(), {}, "79% of the longest's tokens recur", False),
        (Copy(mode="prefix"), {}, "not built: mode=prefix", False),
        (ONCE, {"stack": "SM*2"}, "the marker asks for, by an SSD without", False),
        (ONCE, {"1.A.position": "none"}, "to prefer the earliest .* without rotation", False),
        (ONCE, {"stack": "SM AM", "S__skip": False}, "not built: S.skip=false", False),
        (FIXED, {"stack": "SM*2"}, "rank 32, and one SSD has at most 128", False),
        (FIXED, {"stack": "SM", "d_model": 2, "S__d_state": 2}, "hold 4 numbers .* 191", True),
        (
            Copy(seq_len=64, shortest=32, repeats=False),
            {"stack": "SM", "d_model": 2, "S__d_state": 2},
            "hold 4 numbers .* 177 bits",
            True,
        ),
        (FIXED, {"A__position": "none"}, "past as a set", False),
        (FIXED, {"stack": "NM"}, "no mixer", True),
    ],
    ids=str,
)
def test_what_cannot_is_refused_with_its_bound(task, given, words, proven):
    with pytest.raises(CannotError, match=words) as refused:
        oracle(task, **given)
    assert refused.value.proven is proven

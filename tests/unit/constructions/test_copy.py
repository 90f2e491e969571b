"""Weights set by hand: copies."""

import pytest
import torch

from lab.constructions import CannotError
from lab.layers.ssd import SSD
from lab.models import Block
from lab.models.evaluation import evaluate
from tasks.copying import Copy
from tests.unit.constructions.test_recall import assert_solves, make_construction

ONCE = Copy(seq_len=64, repeats=False)
"""Strings of 6 … 32 tokens, none twice."""
FIXED = Copy(seq_len=64, shortest=32)
SUFFIX = Copy(seq_len=64, mode="suffix", repeats=False)
MASKS = ("none", "literal", "straight-through", "soft", "value", "oracle")


@pytest.mark.parametrize("letter", "AI")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("task", [ONCE, FIXED], ids=["once", "fixed"])
def test_attention_copies_under_every_open_mask(task, letter, mask):
    assert_solves(task, make_construction(task, f"{letter}M*2", **{f"{letter}__mask": mask}))


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
        (SUFFIX, {"stack": "SM*2"}),
        (SUFFIX, {"stack": "SM*2", "S__position": "decay"}),
        (Copy(seq_len=32, repeats=False), {"stack": "SM*2"}),
        (Copy(seq_len=32, repeats=False), {"stack": "SM*2", "S__position": "decay"}),
        (Copy(seq_len=32, repeats=False), {"stack": "SM*2", "S__gate": "silu", "n_heads": 2}),
        (Copy(seq_len=32, repeats=False), {"stack": "SM*2", "1.S.gate": "norm"}),
        (Copy(seq_len=16, mode="suffix", repeats=False, vocab_size=17), {"stack": "AM SM"}),
        (ONCE, {"stack": "SM*2", "d_model": 130}),
        (ONCE, {"stack": "SM*2", "d_model": 130, "S__position": "decay"}),
        (FIXED, {"stack": "AM"}),
        (FIXED, {"stack": "IE", "n_heads": 4}),
        (Copy(shortest=100, vocab_size=512), {}),
    ],
    ids=str,
)
def test_a_copy_is_solved(task, given):
    assert_solves(task, make_construction(task, **given))


@pytest.mark.parametrize("position", ["rope", "decay"])
def test_an_ssd_copies_nearly_all_of_strings_of_more_tokens_than_channels(position):
    model = make_construction(ONCE, "SM*2", S__position=position)
    reached = evaluate(ONCE, model, rows=128, rows_at_once=64, seed=0)
    assert 0.99 <= reached.accuracy < 1
    assert reached.loss < 0.06


def test_the_marker_of_a_copy_reads_the_first_token_alone():
    model = make_construction(ONCE, "SM*2", S__position="decay")
    batch = ONCE.batch(size=16)
    marker = batch.inputs.eq(0).int().argmax(1)
    block = model.blocks[1]
    assert isinstance(block, Block)
    assert isinstance(block.mixer, SSD)
    assert block.norm_mixer is not None
    with torch.no_grad():
        _, cache = model.run_with_cache(batch.inputs, "blocks.0.hook_resid_post")
        matrix = block.mixer.matrix(block.norm_mixer(cache["blocks.0.hook_resid_post"]))
    read = matrix[torch.arange(16), 0, marker]
    # The marker writes nothing: it has no code. Of what stands before it, the first counts.
    others = (torch.arange(64) < marker[:, None]) & (torch.arange(64) > 0)
    assert (read.abs().where(others, torch.tensor(0.0)).sum(1) < 0.02 * read[:, 0]).all()


@pytest.mark.parametrize(
    ("task", "given", "words", "proven"),
    [
        (Copy(), {}, "79 % of the longest's tokens recur", False),
        (Copy(mode="prefix"), {}, "by hand .*: mode=prefix", False),
        (ONCE, {"stack": "AM SM"}, "an SSD cannot look up what the marker asks for", False),
        (Copy(), {"stack": "SM*2"}, "79 % of the longest's tokens recur", False),
        (ONCE, {"stack": "SM*2", "S__position": "none"}, "in no order", False),
        (
            ONCE,
            {"stack": "SM*2", "S__skip": False},
            "by hand .*: S.skip=false",
            False,
        ),
        (
            Copy(seq_len=64, repeats=False, vocab_size=128),
            {"stack": "SM*2"},
            "127 keys in 31 channels .* d_model=110 with d_state=54",
            False,
        ),
        (ONCE, {"1.A.position": "none"}, "to prefer the earliest .* without rotation", False),
        (
            ONCE,
            {"stack": "SM AM", "S__skip": False},
            "by hand .*: S.skip=false",
            False,
        ),
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
        make_construction(task, **given)
    assert refused.value.proven is proven

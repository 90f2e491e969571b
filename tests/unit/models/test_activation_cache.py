"""Short names mean what they say, and the parts of the residual stream add up to the logits."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from lab.models import build
from tests.case import move
from tests.intervened import TOKENS, UserMixer, attention, experts, stack
from tests.ssd_variants import moved as ssd_moved


@pytest.fixture(scope="module")
def model():
    """Attention and SSD of two heads, a gated norm, a user's mixer, and experts, in fp64."""
    mixers = [attention(), ssd_moved(), ssd_moved(gate="norm"), UserMixer()]
    torch.manual_seed(5)
    return move(stack(*mixers, None, mlps=(experts("cdmoe"), experts("shared"))))


@pytest.fixture(scope="module")
def run(model):
    with torch.no_grad():
        return model.run_with_cache(TOKENS)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (("pattern", 0), "blocks.0.mixer.hook_pattern"),
        (("attn", 0), "blocks.0.mixer.hook_pattern"),
        (("q", 0, "attn"), "blocks.0.mixer.hook_q"),
        ("pattern0", "blocks.0.mixer.hook_pattern"),
        ("blocks.0.attn.hook_pattern", "blocks.0.mixer.hook_pattern"),
        ("embed", "hook_embed"),
        ("scale", "norm_final.hook_scale"),
        ("ln_final.hook_scale", "norm_final.hook_scale"),
        ("scale0ln1", "blocks.0.norm_mixer.hook_scale"),
        (("resid_post", -1), "blocks.6.hook_resid_post"),
        (("mlp_out", -1), "blocks.6.hook_mlp_out"),
        (("ssm_state", 1), "blocks.1.mixer.hook_ssm_state"),
        (("pre", 5), "blocks.5.mlp.cross_domain.hook_pre"),
        (("attn_out", 3, "block"), "blocks.3.hook_attn_out"),
    ],
    ids=str,
)
def test_a_short_name_finds_its_point(run, key, name):
    assert run[1][key] is run[1][name]


@pytest.mark.parametrize(
    "key", [("pattern", 1), "pattern1", "blocks.1.attn.hook_pattern", "pattern"]
)
def test_a_pattern_that_a_mixer_lacks_is_answered_with_its_matrix(model, run, key):
    cache = run[1]
    with pytest.raises(KeyError, match="block 1 has a matrix of another kind: ") as raised:
        cache[key]
    expression = raised.value.args[0].partition("another kind: ")[2]
    found = eval(expression, {"model": model, "tokens": TOKENS})
    mixer = model.blocks[1].mixer
    x = model.blocks[1].norm_mixer(cache["resid_pre", 1])
    assert_close(mixer.project(x, found @ mixer.values(x)), cache["attn_out", 1])


def test_a_short_name_without_a_block_is_told_to_have_one(run):
    with pytest.raises(KeyError, match=r"pattern: give its block, too, as in \('pattern', 0\)"):
        run[1]["pattern"]
    with pytest.raises(KeyError, match=r"ssm_state: .*, as in \('ssm_state', 1\)"):
        run[1]["ssm_state"]
    with pytest.raises(KeyError, match="patern: no such tensor was kept; near names: hook_pattern"):
        run[1]["patern"]


def test_a_mixer_without_a_matrix_is_not_said_to_have_one(run):
    with pytest.raises(KeyError) as raised:
        run[1]["pattern", 4]
    assert "matrix" not in raised.value.args[0]


def test_a_name_that_is_missing_or_ambiguous_says_so(model):
    both = build("AM", vocab_size=8, d_model=8).run_with_cache(TOKENS)[1]
    assert both["scale", 0, "ln2"] is both["blocks.0.norm_mlp.hook_scale"]
    with pytest.raises(KeyError, match=r"may be blocks\.0\.norm_mixer\.hook_scale or"):
        both["scale", 0]
    with pytest.raises(KeyError, match=r"near names: blocks\.0\.hook_resid_pre"):
        both["resid_prae", 0]
    wrong: list[Any] = [7, ("pattern", "x")]
    for key in wrong:
        with pytest.raises(KeyError, match=r"must be a name, \(name, layer\) or"):
            both[key]
    assert repr(both).startswith("ActivationCache of ")
    assert "tensor(" not in repr(both)
    assert isinstance(both, dict)
    assert ("pattern", 0) not in both


def test_components_add_up_to_the_logits(model, run):
    logits, cache = run
    parts, labels = cache.decompose_resid(return_labels=True)
    assert labels == ["embed", *(f"{i}_attn_out" for i in range(4)), "5_mlp_out", "6_mlp_out"]
    assert_close(parts.sum(0), cache["resid_post", -1])
    normed = cache.decompose_resid(apply_ln=True)
    assert_close((normed @ model.head.weight.T).sum(0), logits)
    right, wrong = TOKENS.roll(1, 1), TOKENS
    expected = logits.gather(-1, right[..., None])[..., 0]
    assert_close(cache.logit_attrs(parts, right).sum(0), expected)
    difference = expected - logits.gather(-1, wrong[..., None])[..., 0]
    assert_close(cache.logit_attrs(parts, right, wrong).sum(0), difference)
    assert_close(cache.logit_attrs(parts, 3).sum(0), logits[..., 3])
    assert_close(
        cache.logit_attrs(parts[:, :, -1], right[:, -1], pos_slice=-1).sum(0), expected[:, -1]
    )
    unscored = right.clone()
    unscored[0, 2] = -100
    assert cache.logit_attrs(parts, unscored).isnan().nonzero()[:, 1:].unique(dim=0).tolist() == [
        [0, 2]
    ]
    with pytest.raises(ValueError, match="tokens must be in 0 … 7"):
        cache.logit_attrs(parts, 8)


def test_heads_and_the_rest_add_up_to_the_logits(model, run):
    logits, cache = run
    heads, labels = cache.stack_head_results(incl_remainder=True, return_labels=True)
    ssd = [f"L1H{i}" for i in range(4)]
    assert labels == ["L0H0", "L0H1", *ssd, "L2", "L3", "remainder"]
    assert_close(heads[:2].sum(0), cache["attn_out", 0])
    assert_close(heads[2:6].sum(0), cache["attn_out", 1])
    attributed = cache.logit_attrs(heads, TOKENS)
    assert_close(attributed.sum(0), logits.gather(-1, TOKENS[..., None])[..., 0])


def test_a_head_is_what_ablating_the_others_leaves(model, run):
    alone = run[1].stack_head_results()[1]
    name = "blocks.0.mixer.hook_z"
    with model.hooks([(name, lambda z, hook: z * torch.tensor([0.0, 1.0])[:, None])]):
        _, cache = model.run_with_cache(TOKENS, "blocks.0.hook_attn_out")
    assert_close(cache["attn_out", 0], alone)


def test_parts_before_a_layer_add_up_to_what_it_reads(model, run):
    cache = run[1]
    for layer, mlp_input in ((2, False), (2, True), (6, True)):
        parts = cache.decompose_resid(layer, mlp_input=mlp_input)
        assert_close(parts.sum(0), cache["resid_mid" if mlp_input else "resid_pre", layer])
    normed = cache.decompose_resid(6, mlp_input=True, apply_ln=True)
    mlp = model.blocks[6]
    assert_close(normed.sum(0), mlp.norm_mlp(cache["resid_mid", 6]))
    only = cache.decompose_resid(mode="mlp", incl_embeds=False, return_labels=True)[1]
    assert only == ["5_mlp_out", "6_mlp_out"]
    with pytest.raises(ValueError, match="mode='x': must be one of all, mlp, attn"):
        cache.decompose_resid(mode="x")


def test_the_lens_at_the_last_depth_is_the_model(model, run):
    logits, cache = run
    lens, labels = cache.logit_lens(return_labels=True)
    assert labels == [*(f"{i}_pre" for i in range(7)), "final_post"]
    assert_close(lens[-1], logits)
    assert_close(lens[2], model.head(model.norm_final(cache["resid_pre", 2])))
    assert_close(cache.logit_lens(pos_slice=-1)[-1], logits[:, -1])
    mids = cache.accumulated_resid(3, incl_mid=True, return_labels=True)[1]
    assert mids == ["0_pre", "0_mid", "1_pre", "1_mid", "2_pre", "2_mid", "3_pre"]
    normed = cache.accumulated_resid(3, apply_ln=True)[-1]
    assert_close(normed, model.blocks[3].norm_mixer(cache["resid_pre", 3]))


@torch.no_grad()
def test_a_norm_without_a_scale_is_refused_but_not_by_the_lens():
    model = build("AM", vocab_size=8, d_model=8)
    model.add_module("norm_final", nn.LayerNorm(8))
    logits, cache = model.run_with_cache(TOKENS)
    assert_close(cache.logit_lens()[-1], logits)
    with pytest.raises(
        ValueError, match="norm_final is LayerNorm, must have a point for its scale"
    ):
        cache.decompose_resid(apply_ln=True)


def test_the_configuration_is_read_from_the_layers(model):
    cfg = build("AM*2", vocab_size=32, d_model=16, n_heads=2).cfg
    assert (cfg.n_layers, cfg.d_model, cfg.d_vocab, cfg.n_heads, cfg.d_head) == (2, 16, 32, 2, 8)
    assert (cfg.d_mlp, cfg.attn_only, cfg.dtype) == (64, False, torch.float32)
    assert (model.cfg.n_heads, model.cfg.d_mlp) == (None, None)
    assert build("AN", vocab_size=8, d_model=8).cfg.attn_only


def test_a_model_returns_the_matrices_that_its_mixers_apply(model, run):
    cache = run[1]
    found = model.matrices(TOKENS)
    mixing = [layer for layer, block in enumerate(model.blocks) if block.mixer is not None]
    assert [*found] == mixing
    assert [*model.matrices(TOKENS, layers=[1])] == [1]
    for layer, matrix in found.items():
        mixer, x = model.blocks[layer].mixer, cache["resid_pre", layer]
        x = model.blocks[layer].norm_mixer(x)
        assert_close(mixer.project(x, matrix @ mixer.values(x)), cache["attn_out", layer])
    with pytest.raises(ValueError, match=r"layers: 9 is none of the model's 0 … "):
        model.matrices(TOKENS, layers=[9])


def test_positions_are_kept_as_in_transformer_lens(model, run):
    _, cache = run
    whole = cache.accumulated_resid()
    for given, kept in ((2, 2), ((2, 5), slice(2, 5)), ((None, 3), slice(3)), ([2, 5], [2, 5])):
        assert torch.equal(cache.accumulated_resid(pos_slice=given), whole[:, :, kept])


def test_a_cache_moves_and_becomes_a_dictionary():
    torch.manual_seed(0)
    model = build("AM", vocab_size=32, d_model=8)
    cache = model.run_with_cache(torch.arange(6)[None])[1]
    moved = cache.to("meta")
    assert list(moved) == list(cache) == list(cache.cache_dict)
    assert all(x.is_meta for x in moved.values())
    assert torch.equal(cache.cache_dict["blocks.0.mixer.hook_pattern"], cache["pattern", 0])
    assert type(cache.cache_dict) is dict
    assert moved.model is model

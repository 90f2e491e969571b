"""Opened models taken apart: rotations, norms and MLPs, and what adds to a logit."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lab
from analysis.run.anatomy import StackAnatomy
from lab.foreign.attention import ForeignAttention, ForeignRotation, find_rotation
from lab.foreign.opened import OpenedModel
from lab.hooks import hook_points
from lab.models.anatomy import dissect
from lab.peers import load
from tests.parity.opened import (
    HEADS,
    SIZES,
    TOKENS,
    WITHIN,
    T,
    difference,
    every_attention,
    every_model,
    make,
    mixer_of,
    pair,
)

GROUPED = {**SIZES, **HEADS, "num_key_value_heads": 2}
ROTARY: dict[str, tuple[dict[str, Any], ForeignRotation]] = {
    "Llama": (GROUPED, ForeignRotation(4, False, "half")),
    "GPTNeoX": ({**SIZES, **HEADS, "rotary_pct": 0.5}, ForeignRotation(2, False, "half")),
    "Cohere": (
        {**GROUPED, "logit_scale": 1.0},
        ForeignRotation(4, False, "interleaved", "interleaved"),
    ),
    "Ernie4_5": ({**GROUPED, "head_dim": 4}, ForeignRotation(4, False, "interleaved", "half")),
    "GptOss": (
        {**GROUPED, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
        ForeignRotation(8, False, "half", "pairs"),
    ),
    "Qwen3": ({**GROUPED, "head_dim": 4}, ForeignRotation(4, False, "half")),
}
"""Small models, and how they rotate: all or a part of the channels, in pairs of two layouts."""


def open_small(name: str, sizes: dict[str, Any]) -> OpenedModel:
    of = load("transformers")
    torch.manual_seed(0)
    config = getattr(of, f"{name}Config")(**sizes)
    options = {"experts_implementation": "eager"} if name == "GptOss" else {}
    model = of.AutoModelForCausalLM.from_config(config, **options).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 5)
    return lab.open("hf", model)


def rotate_as_the_library(mixer: ForeignAttention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q and k [b h t p] by the library's own function, and what the model gave the layer."""
    module: Any = importlib.import_module(type(mixer.module).__module__)
    assert mixer._kept is not None
    cos, sin = mixer._kept[1].kwargs["position_embeddings"]
    return module.apply_rotary_pos_emb(q, k, cos, sin)


@pytest.mark.parametrize("name", ROTARY)
@torch.no_grad()
def test_queries_and_keys_before_their_rotation_give_the_pattern(name: str):
    """Rotated by the library's own function, with the model's own cosines and sines."""
    sizes, rotation = ROTARY[name]
    opened = open_small(name, sizes)
    logits, cache = opened.run_with_cache(TOKENS)
    assert difference(logits, opened.foreign(TOKENS, use_cache=False).logits) < 1e-6
    for layer in range(2):
        mixer = mixer_of(opened, layer)
        assert mixer.rotation == rotation
        q, k = (cache[point, layer].transpose(1, 2) for point in ("q", "k"))
        rotated = rotate_as_the_library(mixer, q, k)
        for found, point in zip(rotated, ("rot_q", "rot_k"), strict=True):
            assert difference(found.transpose(1, 2), cache[point, layer]) < 1e-6
        assert difference(cache["rot_q", layer], q.transpose(1, 2)) > 1e-2
        k = rotated[1].repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = rotated[0] @ k.mT * mixer.module.scaling
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).exp()
        sink = mixer.module.sinks.exp()[:, None, None] if name == "GptOss" else 0.0
        pattern = weights / (weights.sum(-1, keepdim=True) + sink)
        assert difference(cache["pattern", layer], pattern) < 1e-6


@torch.no_grad()
def test_queries_and_keys_before_their_rotation_are_what_the_layers_maps_return():
    _, opened = pair("llama")
    _, cache = opened.run_with_cache(TOKENS)
    module, x = mixer_of(opened, 1).module, cache["resid_pre", 1]
    block: Any = opened.blocks[1]
    normed = block.norm_mixer(x)
    assert difference(cache["q", 1].flatten(2), module.q_proj(normed)) < 1e-12
    assert difference(cache["k", 1].flatten(2), module.k_proj(normed)) < 1e-12


@torch.no_grad()
def test_a_change_before_the_rotation_is_one_after_it():
    """Rotations are linear; what is only looked at keeps the model's bits, in low precision too."""
    _, opened = pair("llama")
    head = torch.tensor([1.0, 0.0, 1.0, 1.0])[:, None]
    found, asked = (
        opened.run_with_hooks(
            TOKENS, fwd_hooks=[(f"blocks.1.mixer.{point}", lambda q, hook: q * head)]
        )
        for point in ("hook_q", "hook_rot_q")
    )
    assert difference(found, asked) < 1e-12
    assert difference(found, opened(TOKENS)) > 1e-3
    for model in (opened, lab.open("hf", make("llama").bfloat16())):
        points = [f"blocks.{i}.mixer.hook_{x}" for i in range(2) for x in ("q", "k")]
        assert torch.equal(model.run_with_cache(TOKENS, points)[0], model(TOKENS))


def test_gradients_reach_queries_before_their_rotation():
    _, opened = pair("llama")
    kept = []

    def keep(q: Tensor, hook: Any) -> None:
        kept.append(q)

    with opened.hooks([("blocks.0.mixer.hook_q", keep)]):
        logits = opened(TOKENS)
    (gradient,) = torch.autograd.grad(logits.square().sum(), kept)
    assert gradient.abs().max() > 0


def test_a_rotation_of_another_form_gets_no_points():
    q, k = torch.randn(2, 1, 2, 3, 8, dtype=torch.float64)
    angle = torch.randn(1, 3, 4, dtype=torch.float64)
    angles = 2 * angle.cos(), 2 * angle.sin()
    for width, last in ((4, False), (4, True), (8, False)):
        for layout in ("half", "interleaved"):
            half = angles[0][..., : width // 2], angles[1][..., : width // 2]
            rotation = ForeignRotation(width, last, layout, "pairs")
            after = rotation.turn(q, half), rotation.turn(k, half)
            assert find_rotation((q, k), after, half) == rotation
    assert find_rotation((q, k), (q, k), angles) == ForeignRotation(0, False, "half")
    rotation = ForeignRotation(8, False, "half", "pairs")
    normed = [x / x.norm(dim=-1, keepdim=True) for x in (q, k)]
    after = [rotation.turn(x, angles) for x in (q, k)]
    lengths = [x / x.norm(dim=-1, keepdim=True) for x in after]
    assert find_rotation((normed[0], normed[1]), (lengths[0], lengths[1]), angles) is None


@every_model
@torch.no_grad()
def test_contributions_add_up_to_a_difference_of_logits(name: str):
    """Of halves and of heads, for the last norm at the scale that it had."""
    _, opened = pair(name)
    logits, cache = opened.run_with_cache(TOKENS)
    right, wrong = TOKENS.roll(1, 1), TOKENS
    expected = logits.gather(-1, right[..., None]) - logits.gather(-1, wrong[..., None])
    shift = cache.compute_shift_logit(right, wrong)
    assert bool(shift.any()) == (name in ("gpt2", "gpt_neox"))
    for parts in (cache.decompose_resid(), cache.stack_head_results(incl_remainder=True)):
        assert difference(parts.sum(0), cache["resid_post", -1]) < WITHIN[name]
        found = cache.logit_attrs(parts, right, wrong).sum(0) + shift
        assert difference(found, expected[..., 0]) < WITHIN[name]
    normed = cache.decompose_resid(1, apply_ln=True).sum(0)
    norm: Any = opened.blocks[1].norm_mixer
    assert difference(normed + norm.shift, norm(cache["resid_pre", 1])) < WITHIN[name]


@torch.no_grad()
def test_parts_have_the_names_of_what_adds_them():
    first = {"gpt2": ["embed", "pos_embed"], "llama": ["embed"]}
    for name, labels in first.items():
        cache = pair(name)[1].run_with_cache(TOKENS)[1]
        halves = [f"{i}_{half}_out" for i in range(2) for half in ("attn", "mlp")]
        assert cache.decompose_resid(return_labels=True)[1] == labels + halves
    positions = pair("gpt2")[0].transformer.wpe.weight[: TOKENS.shape[1]]
    cache = pair("gpt2")[1].run_with_cache(TOKENS)[1]
    assert difference(cache.decompose_resid()[1], positions.expand(len(TOKENS), -1, -1)) < 1e-12


@torch.no_grad()
def test_a_head_is_what_ablating_the_others_leaves():
    """Brute force: with the rest of the stream held fixed, a layer whose other heads are at 0."""
    _, opened = pair("gpt2")
    _, cache = opened.run_with_cache(TOKENS)
    heads, labels = cache.stack_head_results(return_labels=True)
    found = heads[labels.index("L1H2")] + heads[labels.index("L1rest")]
    keep = torch.tensor([0.0, 0.0, 1.0, 0.0])[:, None]
    with opened.hooks([("blocks.1.mixer.hook_z", lambda z, hook: z * keep)]):
        alone = opened.run_with_cache(TOKENS, "blocks.1.hook_attn_out")[1]["attn_out", 1]
    assert difference(found, alone) < 1e-12


@torch.no_grad()
def test_what_a_block_norms_after_its_halves_counts_as_it_is_added():
    """Gemma 2 adds a norm of what attention returns: its parts are differences of the stream."""
    _, opened = pair("gemma2")
    _, cache = opened.run_with_cache(TOKENS)
    parts, labels = cache.decompose_resid(return_labels=True)
    layer: Any = opened.foreign.model.layers[1]
    added = layer.post_attention_layernorm(cache["attn_out", 1])
    assert difference(parts[labels.index("1_attn_out")], added) < 1e-6
    assert cache.stack_head_results(return_labels=True)[1] == ["L0", "L1"]
    # OLMo 2 has these norms and none before: its MLP reads the stream itself.
    opened = open_small("Olmo2", GROUPED)
    logits, cache = opened.run_with_cache(TOKENS)
    block: Any = opened.blocks[0]
    assert difference(cache["mlp_out", 0], block.mlp(cache["resid_mid", 0])) < 1e-12
    found = cache.logit_attrs(cache.decompose_resid(), TOKENS).sum(0)
    assert difference(found, logits.gather(-1, TOKENS[..., None])[..., 0]) < 1e-6
    with opened.hooks([("blocks.0.hook_resid_mid", lambda x, hook: 2 * x)]):
        after = opened.run_with_cache(TOKENS, "blocks.0.hook_resid_post")[1]["resid_post", 0]
    mid, layer = 2 * cache["resid_mid", 0], opened.foreign.model.layers[0]
    assert difference(after, mid + layer.post_feedforward_layernorm(layer.mlp(mid))) < 1e-6


@pytest.mark.parametrize(
    ("name", "last"),
    [("llama", "RMSNorm and head"), ("gpt2", "LayerNorm and head"), ("mamba", "RMSNorm and head")],
)
def test_the_drawing_names_the_last_norm(name: str, last: str):
    _, opened = pair(name)
    found = StackAnatomy.of(dissect(opened))
    assert found.head.name == last
    texts = [label["text"] for label in found.figure().to_dict()["layout"]["annotations"]]
    assert f"<b>{last}</b>" in "".join(texts)
    assert opened.cfg.normalization_type == ("LN" if name == "gpt2" else "RMS")


@pytest.mark.parametrize(
    ("name", "d_head", "d_mlp"),
    # GPT-2 has 4 d, which its configuration does not say.
    [("llama", 4, 24), ("gpt2", 4, 64), ("mamba", None, None)],
)
def test_sizes_are_those_of_the_layers(name: str, d_head: int | None, d_mlp: int | None):
    cfg = pair(name)[1].cfg
    assert (cfg.d_head, cfg.d_mlp) == (d_head, d_mlp)


@pytest.mark.parametrize(
    ("name", "size"),
    # In fp64: keys and values, two heads of four in Llama; inputs and states of 32 channels.
    [("llama", 2 * 7 * 2 * 8 * 8), ("gpt2", 2 * 7 * 2 * 16 * 8), ("mamba", 2 * 32 * (4 + 4) * 8)],
)
def test_the_state_of_a_row_is_the_models_own_cache(name: str, size: int):
    _, opened = pair(name)
    assert opened.state_bytes(7) == size
    found = dissect(opened, 7)
    assert str(found.state) == f"{size:,} bytes at 7 tokens"


def test_heads_may_be_wider_than_their_share():
    transformers = load("transformers")
    config = transformers.LlamaConfig(**SIZES, **HEADS, head_dim=8)
    assert lab.open("hf", transformers.LlamaForCausalLM(config)).cfg.d_head == 8


def test_the_drawing_names_no_norm_where_there_is_none():
    opened = lab.open("hf", make("llama"))
    opened.add_module("norm_final", nn.Identity())
    assert dissect(opened).head.name == "Head"
    opened.add_module("norm_final", nn.LayerNorm(16, elementwise_affine=False).double())
    assert dissect(opened).head.name == "LayerNorm and head"


def test_what_has_no_place_between_its_halves_says_so():
    sizes = {**SIZES, "num_attention_heads": 4, "ffn_dim": 24, "word_embed_proj_dim": 16}
    _, cache = open_small("OPT", sizes).run_with_cache(TOKENS)
    with pytest.raises(ValueError, match="block 0 does not add what its mixer and its MLP return"):
        cache.decompose_resid()


@every_model
@torch.no_grad()
def test_norms_pass_the_parts_of_their_formula(name: str):
    """The scale and the normalised stream, computed from the library's weights by their names."""
    _, opened = pair(name)
    _, cache = opened.run_with_cache(TOKENS)
    centered = name in ("gpt2", "gpt_neox")
    norms = {"blocks.1.norm_mixer": ("resid_pre", 1), "norm_final": ("resid_post", 1)}
    if "blocks.1.hook_resid_mid" in cache and opened.blocks[1].mlp is not None:
        norms["blocks.1.norm_mlp"] = ("resid_mid", 1)
    for norm, read in norms.items():
        x = cache[read].double()
        x = x - x.mean(-1, keepdim=True) if centered else x
        scale = cache[f"{norm}.hook_scale"]
        module: Any = opened.get_submodule(norm)
        eps = module.eps
        assert eps in (1e-5, 1e-6, 1e-12)
        assert scale.shape == (len(TOKENS), T, 1)
        assert difference(scale.square(), x.square().mean(-1, keepdim=True) + eps) < 1e-5
        assert difference(cache[f"{norm}.hook_normalized"], x / scale) < 1e-5
        weight = module.module.weight
        gain = 1 + weight if name == "gemma2" else weight
        assert difference(module.gain, gain) < 1e-5


@every_model
@torch.no_grad()
def test_a_frozen_scale_and_an_ablated_activation_change_what_follows(name: str):
    """A norm with a doubled scale returns half of what it returned, beside its shift."""
    _, opened = pair(name)
    norm: Any = opened.norm_final
    _, cache = opened.run_with_cache(TOKENS, "blocks.1.hook_resid_post")
    x = cache["resid_post", 1]
    with opened.hooks([("norm_final.hook_scale", lambda scale, hook: 2 * scale)]):
        halved = opened.hidden(TOKENS)
    assert difference(halved - norm.shift, (norm(x) - norm.shift) / 2) < 1e-5
    mlp: Any = opened.blocks[0].mlp
    if mlp is not None:
        with opened.hooks([("blocks.0.mlp.hook_post", lambda post, hook: 0 * post)]):
            out = opened.run_with_cache(TOKENS, "blocks.0.hook_mlp_out")[1]["mlp_out", 0]
        assert (out - out[:1, :1]).abs().max() < 1e-12  # what is left is the last map's bias


@every_attention
@torch.no_grad()
def test_the_points_of_an_mlp_are_its_parts(name: str):
    """By the libraries' names of the parts: what the activation and the last map read."""
    _, opened = pair(name)
    _, cache = opened.run_with_cache(TOKENS)
    block: Any = opened.blocks[1]
    own = block.mlp.module
    x = block.norm_mlp(cache["resid_pre" if name == "gpt_neox" else "resid_mid", 1])
    if name in ("llama", "gemma2", "doge"):
        pre, linear = own.gate_proj(x), own.up_proj(x)
        assert difference(cache["pre_linear", 1], linear) < 1e-6
        post, down = own.act_fn(pre) * linear, own.down_proj
    elif name == "gpt2":
        pre = own.c_fc(x)
        post, down = own.act(pre), own.c_proj
    else:
        pre = own.dense_h_to_4h(x)
        post, down = own.act(pre), own.dense_4h_to_h
    assert difference(cache["pre", 1], pre) < 1e-6
    assert difference(cache["post", 1], post) < 1e-6
    assert difference(cache["mlp_out", 1], down(post)) < 1e-6
    assert ("blocks.1.mlp.hook_pre_linear" in cache) == (name in ("llama", "gemma2", "doge"))


def test_experts_of_another_library_have_no_points_of_an_mlp():
    of = load("transformers")
    sizes = {**SIZES, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = of.AutoModelForCausalLM.from_config(of.MixtralConfig(**sizes, num_local_experts=2))
    opened = lab.open("hf", model.eval())
    assert not [point for point in hook_points(opened) if ".mlp." in point]
    assert "blocks.1.hook_mlp_out" in hook_points(opened)

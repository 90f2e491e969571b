"""Opened models: the logits, matrices and states of their own libraries."""

import copy
import sys
from typing import Any

import pytest
import torch

import lab
from lab.foreign.mixer import ForeignMixer
from lab.foreign.opened import OpenedModel
from lab.hooks import hook_points
from lab.layers.mixer import MatrixMixer
from lab.peers import load
from tests.parity.opened import (
    HEADS,
    SIZES,
    TOKENS,
    WITHIN,
    T,
    V,
    difference,
    every_attention,
    every_model,
    every_scan,
    make,
    mixer_of,
    pair,
    read_input,
)


@every_model
@torch.no_grad()
def test_logits_and_decoding_are_the_models_own(name: str):
    model, opened = pair(name)
    if name.startswith("fla"):  # whose own forward needs kernels on a CPU; the copy's does not
        model = opened.foreign
    expected = model(input_ids=TOKENS, use_cache=False).logits
    assert difference(opened(TOKENS), expected) < WITHIN[name]
    logits, state = opened.prefill(TOKENS[:, :5])
    steps = [logits]
    for i in range(5, T):
        one, state = opened.step(TOKENS[:, i], state)
        steps.append(one[:, None])
    assert difference(torch.cat(steps, 1), expected) < WITHIN[name]
    assert state.position.tolist() == [T] * len(TOKENS)
    assert torch.equal(opened.generate(TOKENS, 3)[:, :T], TOKENS)


@every_model
@torch.no_grad()
def test_a_matrix_is_what_the_mixer_applies(name: str):
    _, opened = pair(name)
    for layer in range(2):
        mixer, x = mixer_of(opened, layer), read_input(opened, layer)
        matrix = mixer.matrix(x)
        assert matrix.shape[-2:] == (T, T)
        assert not matrix.triu(1).any()
        assert difference(mixer.matrix(x, rows=slice(3, 6)), matrix[:, :, 3:6]) < 1e-12
        assert difference(mixer.project(x, matrix @ mixer.values(x)), mixer(x)) < WITHIN[name]
        # A length that the model has not run before.
        assert difference(mixer.matrix(x[:, :4]), matrix[:, :, :4, :4]) < 1e-12


@every_attention
@torch.no_grad()
def test_the_pattern_is_that_of_output_attentions(name: str):
    _, opened = pair(name)
    eager = make(name, attn_implementation="eager")
    expected = eager(TOKENS, output_attentions=True, use_cache=False).attentions
    names = [f"blocks.{i}.mixer.hook_pattern" for i in range(2)]
    logits, cache = opened.run_with_cache(TOKENS, names)
    for layer, asked in enumerate(expected):
        assert difference(cache[names[layer]], asked) < 1e-6
        x = read_input(opened, layer)
        assert difference(mixer_of(opened, layer).matrix(x), asked) < 1e-6
    assert difference(logits, opened(TOKENS)) < 1e-6


@every_scan
@torch.no_grad()
def test_the_matrix_is_the_recurrence(name: str):
    """M @ values in fp64 against the recurrence of the paper, token by token."""
    _, opened = pair(name)
    mixer, x = mixer_of(opened, 1), read_input(opened, 1)
    u, dt, log_decay, B, C, _ = mixer._compute_inputs(x)
    b, t, h, p = u.shape
    heads = h // B.shape[2]
    state = u.new_zeros(b, h, p, B.shape[-1])
    outputs = []
    for i in range(t):
        write, read = (z[:, i].repeat_interleave(heads, 1) for z in (B, C))
        decay = log_decay[:, i].exp()
        decay = decay[..., None, None] if log_decay.ndim == 3 else decay[:, :, None]
        state = decay * state + (dt[:, i, :, None] * u[:, i])[..., None] * write[:, :, None]
        outputs.append((state @ read[..., None])[..., 0] + mixer.module.D[:, None] * u[:, i])
    expected = torch.stack(outputs, 2)
    assert difference(mixer.matrix(x) @ mixer.values(x), expected) < 1e-12


@every_scan
@torch.no_grad()
def test_states_are_those_of_the_cache(name: str):
    _, opened = pair(name)
    names = [f"blocks.{i}.mixer.hook_ssm_state" for i in range(2)]
    logits, cache = opened.run_with_cache(TOKENS, names)
    assert difference(logits, opened(TOKENS)) < WITHIN[name]
    for upto in (4, T):
        _, state = opened.prefill(TOKENS[:, :upto])
        carried: Any = state.blocks[0]
        for layer, point in enumerate(names):
            held = carried.held[layer] if name.startswith("fla") else carried.held.layers[layer]
            own = held["recurrent_state"] if isinstance(held, dict) else held.recurrent_states
            own = next(iter(own.values())) if isinstance(own, dict) else own
            found = cache[point][:, upto - 1]
            assert difference(found, own.reshape(found.shape)) < WITHIN[name]


def test_opening_leaves_the_given_model_as_it_was():
    model = make("llama").train()
    before = dict(model.named_modules())
    opened = lab.open("hf", model)
    assert opened.training
    assert dict(model.named_modules()) == before
    assert model.config._attn_implementation == "sdpa"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    shared = {id(p) for p in model.parameters()}
    assert {id(p) for p in opened.parameters()} == shared
    assert sum(p.numel() for p in model.parameters()) == opened.parameter_count()


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_a_line_says_what_blocks_are(name: str):
    """Not the thousands of lines that its modules take, which are listed once for each way in."""
    model, opened = pair(name)
    parts = "LlamaAttention with a matrix, LlamaMLP"
    if name == "mamba2":
        parts = "Mamba2Mixer with a matrix"
    assert repr(opened).splitlines() == [
        f"OpenedModel of {type(model).__name__}: 2 blocks, d_model 16, a vocabulary of {V}",
        f"  blocks 0 to 1: {parts}",
    ]


@torch.no_grad()
def test_a_copy_is_a_model_of_its_own():
    _, opened = pair("llama")
    before = opened(TOKENS)
    other = copy.deepcopy(opened)
    for parameter in other.parameters():
        parameter.mul_(0.5)
    name = "blocks.1.mixer.hook_pattern"
    assert torch.equal(opened(TOKENS), before)
    assert difference(other.run_with_cache(TOKENS, name)[0], other.foreign(TOKENS).logits) < 1e-6
    assert difference(other(TOKENS), before) > 1e-2
    x = read_input(other, 0)
    assert difference(mixer_of(other, 0).matrix(x), mixer_of(opened, 0).matrix(x)) > 1e-3


def test_gradients_are_the_models_own():
    model, opened = pair("gpt_neox")
    weight = model.get_input_embeddings().weight
    direct, through = (
        torch.autograd.grad(logits.square().sum(), weight)[0]
        for logits in (model(input_ids=TOKENS).logits, opened(TOKENS))
    )
    assert difference(through, direct) < 1e-6


@torch.no_grad()
def test_hook_points_have_the_labs_names():
    expected = {
        "llama": (
            "mixer.hook_q",
            "mixer.hook_rot_q",
            "mixer.hook_pattern",
            "hook_resid_mid",
            "hook_mlp_out",
        ),
        "gpt2": ("mixer.hook_q", "mixer.hook_attn_scores", "hook_resid_mid", "hook_attn_out"),
        "mamba": ("mixer.hook_dt", "mixer.hook_ssm_out", "hook_resid_mid"),
    }
    for name, points in expected.items():
        _, opened = pair(name)
        assert {f"blocks.1.{point}" for point in points} < set(hook_points(opened))
        _, cache = opened.run_with_cache(TOKENS)
        assert set(cache) == set(hook_points(opened))
    # Where mixer and MLP are computed side by side there is no place between them.
    assert "blocks.0.hook_resid_mid" not in hook_points(pair("gpt_neox")[1])
    _, cache = pair("llama")[1].run_with_cache(TOKENS)
    assert torch.equal(
        cache["blocks.0.hook_resid_pre"] + cache["attn_out", 0], cache["resid_mid", 0]
    )
    assert pair("llama")[1].cfg.n_heads == 4


def test_what_cannot_be_opened():
    of = load("transformers")
    sizes = {**SIZES, "intermediate_size": 24, "num_attention_heads": 4}
    causal, headless = of.AutoModelForCausalLM, of.AutoModel
    t5 = {"vocab_size": V, "d_model": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8, "d_ff": 16}
    refused = {
        "must be a model of transformers": torch.nn.Linear(2, 2),
        "has no output embedding": headless.from_config(of.LlamaConfig(**sizes)),
        "output embedding has a bias": causal.from_config(of.PhiConfig(**sizes)),
        "has an encoder too": of.AutoModelForSeq2SeqLM.from_config(of.T5Config(**t5)),
        "must be loaded": make("llama").to("meta"),
        "its logits are not its output": causal.from_config(of.Gemma2Config(**sizes, head_dim=4)),
        "no nn.ModuleList holds the 3 layers": _with_layers(make("llama"), 3),
    }
    for words, model in refused.items():
        with pytest.raises(ValueError, match=words):
            lab.open("hf", model)
    with pytest.raises(ValueError, match="kind='gguf': must be one of hf, fla"):
        lab.open("gguf", make("llama"))
    with pytest.raises(ValueError, match=r"tokens: one is 99, must be in 0 … \d+, the vocabulary"):
        lab.open("hf", make("llama"))(torch.tensor([[1, 99]]))


@pytest.mark.parametrize("name", ["GLA", "RetNet", "DeltaNet", "GatedDeltaNet"])
def test_what_has_kernels_alone_says_that_it_needs_a_gpu(name: str):
    """flash-linear-attention's layers call their kernels directly, all but Mamba and Mamba-2."""
    of = load("fla.models")
    config = getattr(of, f"{name}Config")(**SIZES, num_heads=2, fuse_cross_entropy=False)
    with pytest.raises(ValueError, match=f"model={name}ForCausalLM: cannot run on cpu: .* need a"):
        lab.open("fla", getattr(of, f"{name}ForCausalLM")(config))


def _with_layers(model: Any, depth: int) -> Any:
    """Let a model's configuration say that it has other layers than it has."""
    model.config.num_hidden_layers = depth
    return model


@torch.no_grad()
def test_what_an_opened_model_refuses():
    _, opened = pair("mamba")
    with pytest.raises(ValueError, match="runs only as part of its model"):
        opened.blocks[0](torch.zeros(1, 2, 16))
    _, state = opened.prefill(TOKENS)
    with (
        opened.hooks([("blocks.0.mixer.hook_dt", lambda x, hook: None)]),
        pytest.raises(ValueError, match="cannot pass hook points while it decodes"),
    ):
        opened.step(TOKENS[:, 0], state)
    logits, cache = opened.run_with_cache(TOKENS)
    assert difference(cache.logit_lens()[-1], logits) < WITHIN["mamba"]
    llama = pair("llama")[1]
    _, state = llama.prefill(TOKENS)
    with (
        llama.hooks([("blocks.0.mixer.hook_q", lambda q, hook: None)]),
        pytest.raises(ValueError, match="cannot pass queries and keys before their rotation while"),
    ):
        llama.step(TOKENS[:, 0], state)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Bloom", {"hidden_size": 16, "n_layer": 2, "n_head": 2}),
        ("Mpt", {"d_model": 16, "n_layers": 2, "n_heads": 2, "expansion_ratio": 2}),
    ],
)
def test_mlps_that_read_more_than_their_input_get_no_points(name, sizes):
    config = getattr(load("transformers"), f"{name}Config")(vocab_size=V, **sizes)
    torch.manual_seed(0)
    model = load("transformers").AutoModelForCausalLM.from_config(config).eval()
    opened = lab.open("hf", model)
    assert not any("mlp.hook_post" in point for point in hook_points(opened))
    with torch.no_grad():
        assert difference(opened(TOKENS), model(TOKENS).logits) < 1e-5


@torch.no_grad()
def test_norms_that_are_only_looked_at_return_what_the_library_does():
    opened = lab.open("hf", make("llama").bfloat16())
    point = "blocks.0.norm_mixer.hook_scale"
    assert torch.equal(opened.run_with_cache(TOKENS, [point])[0], opened(TOKENS))
    shrink = (point, lambda scale, hook: scale.mul_(0.5))
    assert not torch.equal(opened.run_with_hooks(TOKENS, fwd_hooks=[shrink]), opened(TOKENS))


def test_another_layout_is_opened_without_a_matrix():
    """Layers that no form here knows still run, with hook points on the residual stream."""
    of = load("transformers")
    config = of.RwkvConfig(**SIZES, attention_hidden_size=16)
    torch.manual_seed(0)
    model = of.AutoModelForCausalLM.from_config(config).eval()
    opened = lab.open("hf", model)
    assert isinstance(opened, OpenedModel)
    assert not isinstance(mixer_of(opened, 0), MatrixMixer)
    with torch.no_grad():
        logits, cache = opened.run_with_cache(TOKENS)
        assert difference(logits, model(TOKENS).logits) < 1e-5
    assert "blocks.1.hook_resid_post" in cache


MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4}
HYBRIDS = {
    "FalconH1": (
        {**MAMBA, "mamba_d_ssm": 32, "mamba_n_groups": 1, "head_dim": 4, "ssm_in_multiplier": 1.25}
        | {"embedding_multiplier": 5.65, "lm_head_multiplier": 0.04, "ssm_out_multiplier": 0.25}
        | {"attention_in_multiplier": 1.5, "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.4]},
        ["blocks.1.mixer.mamba.mixer.hook_ssm_out", "blocks.1.mixer.self_attn.mixer.hook_pattern"],
    ),
    "GraniteMoeHybrid": (
        {**MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 4}
        | {"num_experts_per_tok": 2, "shared_intermediate_size": 16, "logits_scaling": 6.0}
        | {"embedding_multiplier": 12.0, "residual_multiplier": 0.22},
        ["blocks.0.mixer.hook_ssm_out", "blocks.1.mixer.hook_pattern"],
    ),
    "Zamba2": (
        {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2}
        | {"hybrid_layer_ids": [1, 3], "num_mem_blocks": 1, "chunk_size": 4}
        | {"mamba_d_state": 8, "n_mamba_heads": 4, "mamba_headdim": 8, "mamba_ngroups": 1},
        ["blocks.0.mixer.hook_ssm_out", "blocks.1.mixer.mamba_decoder.hook_out"],
    ),
}


@pytest.mark.parametrize("name", HYBRIDS)
@torch.no_grad()
def test_layers_with_several_mixers_or_mlps(name: str):
    options, points = HYBRIDS[name]
    of = load("transformers")
    torch.manual_seed(0)
    config = getattr(of, f"{name}Config")(**{**SIZES, **HEADS, **options}, num_key_value_heads=4)
    model = of.AutoModelForCausalLM.from_config(config).eval()
    opened = lab.open("hf", model)
    expected = model(TOKENS, use_cache=False).logits
    assert difference(opened(TOKENS), expected) < 1e-6
    _, state = opened.prefill(TOKENS[:, :5])
    for i in range(5, T):
        logits, state = opened.step(TOKENS[:, i], state)
        assert difference(logits, expected[:, i]) < 1e-5
    logits, cache = opened.run_with_cache(TOKENS)
    assert difference(logits, expected) < 1e-5
    assert set(points) <= set(cache)
    if name != "Zamba2":  # whose layers have no place between their parts
        parts = cache.decompose_resid()
        attributed = cache.logit_attrs(parts, TOKENS).sum(0)
        assert difference(attributed, expected.gather(2, TOKENS[..., None])[..., 0]) < 1e-5
    mixers = [part for part in opened.modules() if isinstance(part, ForeignMixer)]
    assert len(mixers) == {"FalconH1": 4, "GraniteMoeHybrid": 2, "Zamba2": 6}[name]
    for mixer in mixers:
        if isinstance(mixer, MatrixMixer):
            x = torch.randn(1, T, 16)
            applied = mixer.project(x, mixer.matrix(x) @ mixer.values(x))
            assert difference(applied, mixer(x)) < 1e-5
    assert sum(isinstance(mixer, MatrixMixer) for mixer in mixers) == (
        2 if name == "Zamba2" else len(mixers)
    )


DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
DELTA |= {"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Qwen3Next", {**DELTA, **EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 8}),
        ("Qwen3_5Text", {**DELTA, "head_dim": 8}),
        ("OlmoHybrid", DELTA),
        ("KimiLinear", {"layer_types": ["linear_attention", "full_attention"]}),
    ],
)
@torch.no_grad()
def test_models_of_transformers_run_on_a_cpu_beside_flash_linear_attention(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """transformers calls its kernels, which need a GPU, wherever it is installed."""
    of = load("transformers")
    torch.manual_seed(0)
    config = getattr(of, f"{name}Config")(**SIZES, **HEADS, **options, pad_token_id=0)
    model = of.AutoModelForCausalLM.from_config(config).eval()
    opened = lab.open("hf", model)
    found, (prefilled, state) = opened(TOKENS), opened.prefill(TOKENS[:, :5])
    stepped, _ = opened.step(TOKENS[:, 5], state)
    here = sys.modules[type(model).__module__]
    for key, function in list(vars(here).items()):
        if "conv1d" in key or "delta" in key or "kda" in key:
            monkeypatch.setattr(here, key, getattr(function, "__wrapped__", function))
    expected = model(TOKENS, use_cache=False).logits
    assert torch.equal(found, expected)
    assert difference(prefilled, expected[:, :5]) < 1e-5
    assert difference(stepped, expected[:, 5]) < 1e-5


@pytest.mark.parametrize("name", ["Granite", "Cohere"])
@torch.no_grad()
def test_a_factor_on_the_logits_is_the_heads(name: str):
    of = load("transformers")
    torch.manual_seed(0)
    options = {"embedding_multiplier": 3.0, "logits_scaling": 7.0} if name == "Granite" else {}
    config = getattr(of, f"{name}Config")(**SIZES, **HEADS, **options)
    model = of.AutoModelForCausalLM.from_config(config).double().eval()
    opened = lab.open("hf", model)
    expected = model(TOKENS).logits
    assert difference(opened(TOKENS), expected) < 1e-6
    assert difference(opened.hidden(TOKENS) @ opened.W_U, expected) < 1e-6
    assert opened.cfg.final_factor == pytest.approx(1 / 7 if name == "Granite" else 0.0625)
    assert opened.parameter_count() == sum(p.numel() for p in model.parameters())

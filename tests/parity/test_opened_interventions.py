"""Interventions in opened models, against the same change made by hand in the library's model."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from analysis.interventions import ablate, block_edges, edit_matrix, patch, swap_values
from analysis.patching import sweep_heads
from lab.foreign.mamba import ForeignScan
from tests.parity.opened import (
    ATTENTIONS,
    TOKENS,
    WITHIN,
    T,
    difference,
    make,
    mixer_of,
    pair,
    read_input,
)

LAYER, TARGETS, SOURCES = 1, [5, 8], [2, 3]
OTHER = TOKENS.flip(0)
every_transformers = pytest.mark.parametrize("name", [*ATTENTIONS, "mamba", "mamba2"])


def find_layer(model: Any, layer: int) -> Any:
    inner = model.base_model
    return (inner.h if hasattr(inner, "h") else inner.layers)[layer]


@contextmanager
def hooked(module: Any, hook: Any) -> Iterator[None]:
    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


# Not Doge: closed before its mask chooses keys, an edge makes room for another key.
@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name != "doge"])
@torch.no_grad()
def test_blocked_edges_are_a_mask_of_one_layer(name: str):
    model, opened = make(name, attn_implementation="eager"), pair(name)[1]
    layer = find_layer(model, LAYER)
    attention = getattr(
        layer, next(n for n in ("self_attn", "attn", "attention") if hasattr(layer, n))
    )

    def mask(module: Any, args: Any, kwargs: Any) -> Any:
        closed = kwargs["attention_mask"].clone()
        closed[:, :, TARGETS, SOURCES] = torch.finfo(closed.dtype).min
        return args, {**kwargs, "attention_mask": closed}

    with hooked(attention, mask):
        expected = model(TOKENS, use_cache=False).logits
    with block_edges(opened, LAYER, TARGETS, SOURCES):
        found = opened(TOKENS)
    assert difference(found, expected) < WITHIN[name]
    assert difference(opened(TOKENS), expected) > 1e-3


@pytest.mark.parametrize(
    ("name", "scan"), [("mamba", "mamba_selective_scan"), ("mamba2", "mamba2_chunk_scan")]
)
@torch.no_grad()
def test_blocked_edges_are_reads_without_a_write(name: str, scan: str, monkeypatch):
    """By hand: from the scan's output at a target, take what the write of its source adds."""
    model, opened = pair(name)
    inputs = _find_inputs(opened, LAYER)
    of = importlib.import_module(type(model).__module__)
    own, calls = getattr(of, scan), []

    def lessened(*args: Any, **options: Any) -> Any:
        calls.append(scan)
        gate = options.pop("z", None)
        z = own(*args, z=None, **options)
        if len(calls) == LAYER + 1:
            lost = _compute_lost(inputs)
            for target, y in zip(TARGETS, lost, strict=True):
                z = z.clone()
                if name == "mamba":
                    z[:, :, target] -= y[..., 0]
                else:
                    z[:, target] -= y
        return z if gate is None else z * torch.nn.functional.silu(gate)

    monkeypatch.setattr(of, scan, lessened)
    expected = model(TOKENS, use_cache=False).logits
    monkeypatch.setattr(of, scan, own)
    with block_edges(opened, LAYER, TARGETS, SOURCES):
        found = opened(TOKENS)
    assert difference(found, expected) < WITHIN[name]
    assert difference(opened(TOKENS), expected) > 1e-4


def _find_inputs(opened: Any, layer: int) -> Any:
    mixer = mixer_of(opened, layer)
    assert isinstance(mixer, ForeignScan)
    return mixer._compute_inputs(read_input(opened, layer))


def _compute_lost(inputs: Any) -> list[Tensor]:
    """Return, for each blocked edge, what the target reads of its source's write [b h p]."""
    x, dt, log_decay, B, C, _ = inputs
    heads = x.shape[2] // B.shape[2]
    lost = []
    for target, source in zip(TARGETS, SOURCES, strict=True):
        write, read = (z[:, i].repeat_interleave(heads, 1) for z, i in ((B, source), (C, target)))
        state = (dt[:, source, :, None] * x[:, source])[..., None] * write[:, :, None]
        for i in range(source + 1, target + 1):
            decay = log_decay[:, i].exp()
            state = state * (decay[..., None, None] if decay.ndim == 2 else decay[:, :, None])
        lost.append((state @ read[..., None])[..., 0])
    return lost


@every_transformers
@torch.no_grad()
def test_an_edited_matrix_and_swapped_values(name: str):
    """Halving a matrix halves what the mixer's output map reads; swapped values swap columns."""
    _, opened = pair(name)
    mixer, x = mixer_of(opened, LAYER), read_input(opened, LAYER)
    out = f"blocks.{LAYER}.hook_attn_out"
    matrix, values = mixer.matrix(x), mixer.values(x)
    with edit_matrix(opened, LAYER, lambda given, rows: given / 2):
        _, cache = opened.run_with_cache(TOKENS, out)
    assert difference(cache[out], mixer.project(x, matrix @ values / 2)) < 1e-6
    order = torch.arange(T)
    order[[1, 4]] = order[[4, 1]]
    with swap_values(opened, LAYER, [1] * len(TOKENS), [4] * len(TOKENS)):
        _, cache = opened.run_with_cache(TOKENS, out)
    assert difference(cache[out], mixer.project(x, matrix[..., order] @ values)) < 1e-6


@every_transformers
@torch.no_grad()
def test_a_patched_residual_stream(name: str):
    model, opened = pair(name)
    point = f"blocks.{LAYER}.hook_resid_pre"
    source = opened.run_with_cache(OTHER, point)[1][point]

    def replace(layer: Any, args: Any, kwargs: Any) -> Any:
        given = args[0] if args else kwargs["hidden_states"]
        given = given.clone()
        given[:, 4] = source[:, 4]
        return ((given, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": given})

    with hooked(find_layer(model, LAYER), replace):
        expected = model(TOKENS, use_cache=False).logits
    with patch(opened, point, source, positions=[4]):
        assert difference(opened(TOKENS), expected) < WITHIN[name]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mamba"])
@torch.no_grad()
def test_a_patched_middle(name: str):
    """The stream between mixer and MLP is what both the MLP reads and its output is added to."""
    _, opened = pair(name)
    middle, end = (f"blocks.{LAYER}.hook_resid_{part}" for part in ("mid", "post"))
    source = opened.run_with_cache(OTHER, middle)[1][middle]
    with patch(opened, middle, source):
        _, cache = opened.run_with_cache(TOKENS, end)
    other = opened.run_with_cache(OTHER, end)[1][end]
    assert difference(cache[end], other) < 1e-12


@every_transformers
@torch.no_grad()
def test_ablations(name: str):
    """Without what its mixer adds, a layer of one mixer leaves the stream as it was."""
    _, opened = pair(name)
    point = f"blocks.{LAYER}.hook_attn_out"
    names = [f"blocks.{LAYER}.hook_resid_{end}" for end in ("pre", "post")]
    with ablate(opened, [point, *_list_mlps(opened)]):
        _, cache = opened.run_with_cache(TOKENS, names)
    # Gemma 2 would norm zeros after the MLP, Doge multiplies the stream.
    if name not in ("gemma2", "doge"):
        assert difference(cache[names[1]], cache[names[0]]) < 1e-6  # Mamba's stream is in fp32
    with ablate(opened, f"blocks.{LAYER}.hook_resid_pre", "resample", seed=1) as model:
        assert difference(model(TOKENS), opened.foreign(TOKENS).logits) < 1e-6


def _list_mlps(opened: Any) -> list[str]:
    return [] if opened.blocks[LAYER].mlp is None else [f"blocks.{LAYER}.hook_mlp_out"]


@torch.no_grad()
def test_a_hook_on_scores_and_states_replaces_them():
    _, llama = pair("llama")
    with ablate(llama, "blocks.0.mixer.hook_pattern"):
        _, cache = llama.run_with_cache(TOKENS, "blocks.0.hook_attn_out")
    assert not cache["blocks.0.hook_attn_out"].any()  # Llama's output map has no bias
    _, mamba = pair("mamba2")
    mixer, x = mixer_of(mamba, 0), read_input(mamba, 0)
    with ablate(mamba, "blocks.0.mixer.hook_ssm_state"):
        _, cache = mamba.run_with_cache(TOKENS, "blocks.0.hook_attn_out")
    skip = mixer.module.D[:, None, None] * mixer.values(x)
    assert difference(cache["blocks.0.hook_attn_out"], mixer.project(x, skip)) < 1e-6


@pytest.mark.parametrize("name", [*ATTENTIONS, "mamba2"])
@torch.no_grad()
def test_a_sweep_of_heads_is_each_head_patched_by_hand(name: str):
    _, opened = pair(name)
    clean, corrupt = TOKENS[:1], OTHER[:1]
    found = sweep_heads(opened, clean, corrupt, pick)
    points = [
        f"blocks.{i}.mixer.{'hook_ssm_out' if name == 'mamba2' else 'hook_z'}" for i in (0, 1)
    ]
    _, cache = opened.run_with_cache(clean, points)
    assert found.metric.shape == (2, 4)
    for layer, point in enumerate(points):
        for head in range(4):
            with patch(opened, point, cache[point], heads=[head]):
                by_hand = float(pick(opened(corrupt)))
            assert found.metric[layer, head] == pytest.approx(by_hand, abs=1e-6)
    assert np.ptp(found.metric) > 1e-3


def pick(logits: Tensor) -> Tensor:
    return logits[:, -1, 3].mean()


def test_channels_of_a_mamba_are_swept_on_demand():
    _, opened = pair("mamba")
    with pytest.raises(ValueError, match=r"heads \(heads_hook\)\. Give a point: .*\bssm_out\b"):
        sweep_heads(opened, TOKENS[:1], OTHER[:1], pick)
    assert sweep_heads(opened, TOKENS[:1], OTHER[:1], pick, "ssm_out").metric.shape == (2, 32)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mamba2"])
@torch.no_grad()
def test_decoding_intervenes_at_the_positions_of_whole_rows(name: str):
    """From a cache as when every step reads all tokens again."""
    _, opened = pair(name)
    with ablate(opened, "blocks.1.hook_resid_pre", positions=[0, 6]):
        head, state = opened.prefill(TOKENS[:, :5])
        steps = [head]
        for token in TOKENS[:, 5:].T:
            logits, state = opened.step(token, state)
            steps.append(logits[:, None])
        whole = opened(TOKENS)
    assert difference(torch.cat(steps, 1), whole) < WITHIN[name]
    assert difference(opened(TOKENS)[:, 7:], whole[:, 7:]) > 1e-3

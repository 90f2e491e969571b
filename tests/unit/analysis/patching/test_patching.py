"""Sweeps against `patch` cell by cell; edges against a model taken apart by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from analysis.interventions import patch
from analysis.interventions.points import get_block, get_mixer
from analysis.patching import attribute_edges, patch_edges, sweep_heads, sweep_positions
from lab.layers.attention import Attention
from lab.models import build
from tests.case import move
from tests.intervened import TOKENS, UserMixer, attention, experts, stack
from tests.ssd_variants import moved as ssd_moved

CLEAN, CORRUPT = TOKENS[:1], TOKENS[1:2]


def metric(logits):
    """A logit difference after the last token, over all rows."""
    return (logits[:, -1, 3] - logits[:, -1, 5]).mean()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(7)
    mixers = [attention(), ssd_moved(), attention(n_kv_heads=1)]
    return move(stack(*mixers, None, mlps=(experts("cdmoe"),)))


@torch.no_grad()
@pytest.mark.parametrize("point", ["resid_pre", "attn_out", "mlp_out", "z"])
def test_each_cell_of_a_sweep_is_the_patch_by_hand(model, point):
    found = sweep_positions(model, TOKENS[:2], TOKENS[1:], metric, point)
    clean, cache = model.run_with_cache(TOKENS[:2])
    assert found.clean == pytest.approx(float(metric(clean)), abs=1e-12)
    assert found.corrupt == pytest.approx(float(metric(model(TOKENS[1:]))), abs=1e-12)
    for i, layer in enumerate(found.layers):
        inside = "mixer.hook_z" if point == "z" else f"hook_{point}"
        name = f"blocks.{layer}.{inside}"
        for position in (0, 4, 8):
            with patch(model, name, cache[name], positions=[position]):
                by_hand = float(metric(model(TOKENS[1:])))
            assert found.metric[i, position] == pytest.approx(by_hand, abs=1e-10)
    have = {"resid_pre": 5, "attn_out": 3, "mlp_out": 1, "z": 2}
    assert found.metric.shape == (have[point], 9)


@torch.no_grad()
@pytest.mark.parametrize("point", [None, "pattern"])
def test_each_head_of_a_sweep_is_the_patch_by_hand(model, point):
    found = sweep_heads(model, CLEAN, CORRUPT, metric, point)
    cache = model.run_with_cache(CLEAN)[1]
    assert found.layers.tolist() == ([0, 1, 2] if point is None else [0, 2])
    hooks = {0: "hook_z", 1: "hook_ssm_out", 2: "hook_z"}
    for i, layer in enumerate(found.layers):
        name = f"blocks.{layer}.mixer.{hooks[layer] if point is None else 'hook_pattern'}"
        heads = 4 if layer == 1 else 2
        assert np.isfinite(found.metric[i]).sum() == heads
        for head in range(heads):
            with patch(model, name, cache[name], heads=[head]):
                by_hand = float(metric(model(CORRUPT)))
            assert found.metric[i, head] == pytest.approx(by_hand, abs=1e-10)


@torch.no_grad()
def test_a_sweep_says_and_draws_what_it_restores(model):
    found = sweep_positions(model, CLEAN, CORRUPT, metric, labels=list("abcdefghi"))
    last = found.restored[-1]
    assert last[-1] == pytest.approx(1.0)
    assert_close(torch.tensor(last[:-1]), torch.zeros(8).double())
    trace: Any = next(found.figure().select_traces())
    row, column = np.unravel_index(np.nanargmax(found.restored), found.restored.shape)
    assert f"layer {row}, position {column} ({'abcdefghi'[column]}) restores most" in found.says
    assert np.allclose(trace.z[::-1], found.restored)
    same = sweep_positions(model, CLEAN, CLEAN, metric)
    assert same.says.startswith("No patch restores")
    assert np.isnan(same.restored).all()


def test_refusals(model, unchecked):
    with pytest.raises(ValueError, match=r"corrupt is \[1, 8\], must be \[1, 9\] as clean"):
        sweep_positions(model, CLEAN, CORRUPT[:, :8], metric)
    with pytest.raises(ValueError, match="point='resid_prae'"):
        sweep_positions(model, CLEAN, CORRUPT, metric, "resid_prae")
    both = build("AM", vocab_size=8, d_model=8)
    with pytest.raises(ValueError, match=r"may be blocks\.0\.norm_mixer\.hook_normalized or"):
        sweep_positions(both, CLEAN, CORRUPT, metric, "normalized")
    with pytest.raises(ValueError, match="has no axis of heads to patch along"):
        sweep_heads(model, CLEAN, CORRUPT, metric, "resid_pre")
    with pytest.raises(ValueError, match="no mixer of the model names its heads"):
        sweep_heads(stack(UserMixer()), CLEAN, CORRUPT, metric)
    with pytest.raises(ValueError, match="labels has 2 entries, must have 9, a position each"):
        sweep_positions(model, CLEAN, CORRUPT, metric, labels=["a", "b"])
    with pytest.raises(ValueError, match=r"metric: returned \[1, 9, \d+\], must return one number"):
        sweep_positions(model, CLEAN, CORRUPT, lambda logits: logits)
    with pytest.raises(ValueError, match="steps=0: must be ≥ 1"):
        attribute_edges(model, CLEAN, CORRUPT, metric, steps=0)
    with pytest.raises(ValueError, match="must return one number as a tensor that has a gradient"):
        attribute_edges(model, CLEAN, CORRUPT, lambda logits: metric(logits).item())


@pytest.fixture(scope="module")
def small():
    """Two blocks of attention of two heads with a plain MLP, in fp64."""
    torch.manual_seed(3)
    return build("AM AM", vocab_size=8, d_model=8, n_heads=2).double().eval()


@torch.no_grad()
def test_a_patched_edge_is_what_the_model_by_hand_gives(small):
    """The keys of head 1 in block 1 read what head 0 of block 0 adds in the corrupt run."""
    found = patch_edges(small, CLEAN, CORRUPT, metric)
    runs = [small.run_with_cache(tokens)[1] for tokens in (CLEAN, CORRUPT)]
    heads = [run["z", 0].clone() for run in runs]
    for z in heads:
        z[:, :, 1] = 0
    block, mixer = get_block(small, 1), get_mixer(small, 1)
    first = get_mixer(small, 0)
    assert isinstance(first, Attention)
    assert isinstance(mixer, Attention)
    assert block.norm_mixer is not None
    added = [first.out(z.flatten(2)) for z in heads]
    x = runs[0]["resid_pre", 1]
    changed = block.norm_mixer(x - added[0] + added[1])
    q, k, v = (f(block.norm_mixer(x)).unflatten(-1, (2, 4)) for f in (mixer.q, mixer.k, mixer.v))
    k[:, :, 1] = mixer.k(changed).unflatten(-1, (2, 4))[:, :, 1]
    names = [f"blocks.1.mixer.hook_{letter}" for letter in "qkv"]
    pairs = [(n, lambda _, hook, z=z: z) for n, z in zip(names, (q, k, v), strict=True)]
    by_hand = float(metric(small.run_with_hooks(CLEAN, pairs))) - found.clean
    at = found.senders.index("L0H0"), found.receivers.index("L1H1.k")
    assert found.effect[at] == pytest.approx(by_hand, abs=1e-10)
    assert by_hand != 0


@torch.no_grad()
def test_every_edge_of_a_receiver_together_is_its_input_of_the_corrupt_run(small):
    """What only the logits read: their edges' changes add up in the residual stream."""
    found = patch_edges(small, CLEAN, CORRUPT, metric)
    assert found.senders == ("embed", "L0H0", "L0H1", "M0", "L1H0", "L1H1", "M1")
    kinds = [f"L0H{h}.{x}" for x in "qkv" for h in (0, 1)]
    later = [f"L1H{h}.{x}" for x in "qkv" for h in (0, 1)]
    assert found.receivers == (*kinds, "M0", *later, "M1", "logits")
    exists = np.isfinite(found.effect)
    assert exists[0].all()
    assert exists[:, -1].all()
    assert not exists[found.senders.index("M0"), found.receivers.index("M0")]
    assert not exists[found.senders.index("L0H0"), found.receivers.index("L0H1.q")]
    assert exists[found.senders.index("L0H0"), found.receivers.index("M0")]
    strongest = found.list_strongest(3)
    assert abs(strongest[0][2]) == np.nanmax(np.abs(found.effect))
    assert f"{strongest[0][0]} → {strongest[0][1]}" in found.says
    trace: Any = next(found.figure().select_traces())
    assert np.allclose(trace.z, found.effect, equal_nan=True)


@pytest.mark.parametrize("kind", ["attention", "others"])
def test_attribution_is_exact_in_the_linear_limit(kind):
    """Two tokens whose embeddings differ by ε: the error goes down with ε²."""
    torch.manual_seed(4)
    if kind == "attention":
        model = build("AM AM", vocab_size=8, d_model=8, n_heads=2).double().eval()
    else:
        model = stack(ssd_moved(gate="norm"), UserMixer(), mlps=(experts("peer"),))
    table = model.embed.weight
    head = nn.Parameter(table.detach().clone())
    model.head.weight = head
    clean = torch.tensor([[1, 2, 3, 1, 2, 4]])
    corrupt = clean.where(clean != 2, 5)
    way, errors = torch.randn_like(table[0]), []
    for epsilon in (1e-2, 1e-3):
        with torch.no_grad():
            table[5] = table[2] + epsilon * way
        estimated, patched = (
            attribute_edges(model, clean, corrupt, metric),
            patch_edges(model, clean, corrupt, metric),
        )
        assert np.array_equal(np.isfinite(estimated.effect), np.isfinite(patched.effect))
        size = np.nanmax(np.abs(patched.effect))
        errors.append(np.nanmax(np.abs(estimated.effect - patched.effect)) / size)
    assert errors[1] < 0.02
    assert errors[1] < 0.2 * errors[0]


def test_integrated_gradients_follow_large_changes_better(small):
    truth = patch_edges(small, CLEAN, CORRUPT, metric).effect
    exists = np.isfinite(truth)
    plain, integrated = (
        attribute_edges(small, CLEAN, CORRUPT, metric, steps=steps).effect[exists]
        for steps in (None, 8)
    )
    likeness = [np.corrcoef(found, truth[exists])[0, 1] for found in (plain, integrated)]
    print("correlation with patched edges:", likeness)
    assert min(likeness) > 0.5

"""What is patched, ablated or overridden at a hook point is what it says, by loops."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from analysis.interventions import POINT_AXES, ablate, override_mask, patch
from analysis.interventions.points import draw_derangement
from lab.hooks import hook_points
from lab.layers.family.gated_deltanet import GatedDeltaNet
from lab.layers.mlp import MLP
from lab.ops.attention import MASKED
from tests.intervened import ATTENTIONS, EXPERTS, TOKENS, attention, experts, given, stack
from tests.ssd_variants import moved as ssd_moved


@pytest.fixture(scope="module")
def everything():
    """A model that has every kind of point, and what passes them for the tokens, and flipped."""
    mixers = [ATTENTIONS["ifa"](), ssd_moved(position="conv"), GatedDeltaNet(12, 2)]
    model = stack(*mixers, mlps=(*map(experts, EXPERTS), MLP(12, d_ff=5, gated=True)))
    names = [name for name in hook_points(model) if not name.endswith("balance_loss")]
    with torch.no_grad():
        return model, *(model.run_with_cache(x, names)[1] for x in (TOKENS, TOKENS.flip(0)))


def axes_of(name: str, tensor: Tensor) -> list[str]:
    forms = map(str.split, POINT_AXES[name.rpartition(".")[2]])
    return next(form for form in forms if len(form) == tensor.ndim)


FEW = ["blocks.0.mixer.hook_dynamic_mask", "blocks.1.mixer.hook_ssm_out", "blocks.2.hook_resid_mid"]


def test_the_axes_are_named_of_every_point(everything):
    model, clean, _ = everything
    assert {name.rpartition(".")[2] for name in hook_points(model)} == set(POINT_AXES)
    sizes = {"b": 3, "t": 9, "s": 9, "1": 1, "d": 12}
    heads = {"mlp": {2}, "mixer": {1, 2, 4}}
    for name, tensor in clean.items():
        for letter, size in zip(axes_of(name, tensor), tensor.shape, strict=True):
            assert size == sizes.get(letter, size), name
            if letter == "h":
                assert size in heads[name.split(".")[2]], name


@torch.no_grad()
@pytest.mark.parametrize(
    ("rows", "positions", "names"),
    [
        ([0, 2], [3, 4], None),
        (None, [3, 4], FEW),
        ([1], None, [*FEW, "blocks.0.mixer.hook_pattern"]),
        (None, None, FEW),
    ],
    ids=str,
)
def test_every_point_is_patched_where_it_says(everything, rows, positions, names):
    """At each point: rows, positions and heads by loops, from another run's cache."""
    model, clean, other = everything
    for name in names or clean:
        tensor = clean[name]
        axes = axes_of(name, tensor)
        heads = [0] if "h" in axes else None
        places = [letter if letter in "bth" else None for letter in axes]
        expected = tensor.clone()
        for at in np.ndindex(*(n if p else 1 for n, p in zip(tensor.shape, places, strict=True))):
            place = tuple(i if p else slice(None) for i, p in zip(at, places, strict=True))
            b, t = (at[axes.index(letter)] for letter in "bt")
            if rows is not None and positions is not None:
                here = (b, t) in zip(rows, positions, strict=True)
            else:
                here = b in (rows or range(3)) and t in (positions or range(9))
            if here and (heads is None or at[axes.index("h")] in heads):
                expected[place] = other[name][place]
        with patch(model, name, other[name], rows=rows, positions=positions, heads=heads):
            _, patched = model.run_with_cache(TOKENS, name)
        # Which points are watched decides by which form a layer computes: rounding.
        torch.testing.assert_close(patched[name], expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("how", ["zero", "mean", "resample"])
def test_every_point_is_ablated_to_what_it_says(everything, how):
    model, clean, _ = everything
    cycle = draw_derangement(3, seed=4)
    for name, tensor in clean.items():
        if how != "resample" and not tensor.is_floating_point():
            with (
                ablate(model, name, how),
                pytest.raises(ValueError, match=f"indices have no {how}"),
            ):
                model(TOKENS)
            continue
        expected = tensor.clone()
        for b in range(3):
            if how == "zero":
                new = torch.zeros_like(tensor[0])
            elif how == "mean":
                new = (tensor[0] + tensor[1] + tensor[2]) / 3
            else:
                new = tensor[cycle[b]]
            expected[b] = torch.where(tensor[b] == -torch.inf, tensor[b], new)
        with ablate(model, name, how, seed=4):
            _, ablated = model.run_with_cache(TOKENS, name)
        torch.testing.assert_close(ablated[name], expected, rtol=1e-10, atol=1e-10)
    assert all(not point.active for point in hook_points(model).values())


@torch.no_grad()
def test_what_is_ablated_can_be_a_part_of_several_points():
    model = stack(attention(), attention())
    names = ["blocks.0.mixer.hook_z", "blocks.1.mixer.hook_z"]
    _, plain = model.run_with_cache(TOKENS, names[0])
    expected = plain[names[0]].clone()
    expected[[0, 1], [3, 5], 1] = 0
    for chosen in (names, lambda name: name.endswith("hook_z")):
        with ablate(model, chosen, rows=[0, 1], positions=[3, 5], heads=[1]):
            _, cache = model.run_with_cache(TOKENS, names)
        assert torch.equal(cache[names[0]], expected)
        assert (cache[names[1]][[0, 1], [3, 5], 1] == 0).all()
        assert (cache[names[1]] == 0).sum() == 2 * 6


@torch.no_grad()
@pytest.mark.parametrize("how", ["zero", "mean"])
def test_ablated_scores_leave_later_tokens_unread(how):
    """Windows differ between rows, so a mean has −∞ where this row has none."""
    model = stack(attention(mask="value", window=3))
    with ablate(model, "blocks.0.mixer.hook_attn_scores", how):
        logits, cache = model.run_with_cache(TOKENS, "blocks.0.mixer.hook_pattern")
    assert logits.isfinite().all()
    pattern = cache["blocks.0.mixer.hook_pattern"]
    assert (pattern.triu(1) == 0).all()


def decode(model, tokens: Tensor, keep: Tensor | None = None, whole: bool = False) -> Tensor:
    """Return logits from position 4 on: from a cache, or reading all tokens again at every step."""
    if whole:
        ends = range(5, tokens.shape[1] + 1)
        masks = [None if keep is None else keep[:, :t] for t in ends]
        return torch.stack(
            [
                model.prefill(tokens[:, :t], None, mask)[0][:, -1]
                for t, mask in zip(ends, masks, strict=True)
            ],
            1,
        )
    logits, state = model.prefill(tokens[:, :5], None, None if keep is None else keep[:, :5])
    found = [logits[:, -1:]]
    logits, state = model.prefill(tokens[:, 5:7], state)
    found.append(logits)
    for token in tokens[:, 7:].T:
        logits, state = model.step(token, state)
        found.append(logits[:, None])
    return torch.cat(found, 1)


@torch.no_grad()
@pytest.mark.parametrize(
    ("rows", "positions", "padding"), [(None, [0], 0), (None, [2, 6, 8], 3), ([0, 2], [5, 8], 3)]
)
@pytest.mark.parametrize(
    "make", [ATTENTIONS["ifa"], lambda: ssd_moved(position="conv")], ids=["attention", "ssd"]
)
def test_decoding_intervenes_at_the_positions_of_whole_rows(make, rows, positions, padding):
    """Of every point: from a cache as when every step reads all tokens again."""
    model, place = stack(make()), {"rows": rows, "positions": positions}
    keep = torch.ones(3, 9, dtype=torch.bool)
    keep[1, :padding] = False
    _, clean = model.run_with_cache(TOKENS)
    _, other = model.run_with_cache(TOKENS.flip(0))
    for name, tensor in clean.items():
        changes = []
        if "s" not in axes_of(name, tensor):  # which grows
            changes.append(lambda name=name: patch(model, name, other[name], **place))
        if tensor.is_floating_point() and not name.endswith("scale"):  # by which norms divide
            changes.append(lambda name=name: ablate(model, name, **place))
        for change in changes:
            with change():
                found, asked = decode(model, TOKENS, keep), decode(model, TOKENS, keep, whole=True)
            torch.testing.assert_close(found, asked, rtol=1e-9, atol=1e-9, msg=name)


@torch.no_grad()
@pytest.mark.parametrize(
    "name", ["hook_embed", "blocks.0.hook_resid_post", "blocks.1.mixer.hook_ssm_out"]
)
def test_generation_intervenes_at_a_position_once(everything, name):
    model, _, _ = everything
    with ablate(model, name, positions=[0, 10]):
        found, tokens = model.generate(TOKENS, 6), TOKENS
        for _ in range(6):
            logits, _ = model.prefill(tokens)
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, tokens)
    assert not torch.equal(found, model.generate(TOKENS, 6))


@torch.no_grad()
def test_an_overridden_mask_is_that_of_a_whole_row_in_decoding():
    model = stack(ATTENTIONS["soft"]())
    bias = torch.linspace(-2, 2, 9).double()
    with override_mask(model, 0, bias):
        torch.testing.assert_close(decode(model, TOKENS), model(TOKENS)[:, 4:])
        _, state = model.prefill(TOKENS)
        longer, _ = model.step(TOKENS[:, 0], state)
    with override_mask(model, 0, bias[:8]), pytest.raises(ValueError, match=r"bias is \[8\]"):
        model(TOKENS)
    assert longer.isfinite().all()


def test_the_derangement_is_a_seeded_cycle():
    for n in (2, 3, 8):
        order = draw_derangement(n, seed=n)
        assert torch.equal(order, draw_derangement(n, seed=n))
        row, seen = 0, set()
        while row not in seen:
            seen.add(row)
            row = int(order[row])
        assert len(seen) == n
    assert not torch.equal(draw_derangement(8, seed=0), draw_derangement(8, seed=1))


@torch.no_grad()
@pytest.mark.parametrize("mixer", ["plain", "grouped", "soft", "ifa"])
@pytest.mark.parametrize("shape", [(9,), (-1, 9), (3, -1, 9)], ids=str)
def test_the_mask_is_what_it_is_overridden_by(mixer, shape):
    layer = ATTENTIONS[mixer]()
    model = stack(layer)
    x = given(model)
    bias = torch.randn(*(layer.n_kv_heads if n == -1 else n for n in shape)).double()
    bias[..., 2] = MASKED
    layer.mask = None
    plain = layer.matrix(x)
    expected = torch.zeros_like(plain)
    for b, h, t in np.ndindex(*plain.shape[:3]):
        own = bias.expand(3, layer.n_kv_heads, 9)[b, h // (2 // layer.n_kv_heads)]
        weights = [plain[b, h, t, s] * math.exp(own[s]) for s in range(t + 1)]
        expected[b, h, t, : t + 1] = torch.stack(weights) / sum(weights)
    model = stack(ATTENTIONS[mixer]())
    with override_mask(model, 0, bias):
        _, cache = model.run_with_cache(TOKENS, "blocks.0.mixer.hook_pattern")
        logits = model(TOKENS)
    torch.testing.assert_close(
        cache["blocks.0.mixer.hook_pattern"], expected, rtol=1e-10, atol=1e-10
    )
    with patch(model, "blocks.0.mixer.hook_pattern", expected):
        torch.testing.assert_close(logits, model(TOKENS), rtol=1e-10, atol=1e-10)

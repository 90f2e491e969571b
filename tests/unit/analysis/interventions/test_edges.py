"""Blocked edges: each against a loop that says what it means."""

import math
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from torch import Tensor

from analysis.interventions import block_edges
from lab.layers.attention import Attention
from lab.layers.ssd import SSD
from tests.intervened import (
    TOKENS,
    every_attention,
    every_mixer,
    given,
    mixed,
    stack,
)
from tests.ssd_variants import every_variant
from tests.ssd_variants import moved as ssd_moved

EDGES = [(5, 3), (5, 5), (4, 0), (8, 2), (0, 0)]
"""Targets and sources; after (0, 0) the first row of a matrix is empty."""


def is_blocked(row: int, head: int, target: int, source: int, rows, heads) -> bool:
    """Say whether an edge is one of EDGES, which belong to `rows`, in `heads`."""
    return (heads is None or head in heads) and any(
        edge == (target, source) and (rows is None or rows[n] == row)
        for n, edge in enumerate(EDGES)
    )


def record_hooks(mixer: Attention | SSD, x: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return what passes a mixer's hook points, met without the project's own hooks."""
    seen: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for name in names:

            def look(point, args, tensor, name=name):
                seen[name] = tensor

            point = getattr(mixer, f"hook_{name}")
            hooks.callback(point.register_forward_hook(look).remove)
        mixer(x)
    return seen


def loop_attention(mixer: Attention, x: Tensor, rows, heads) -> Tensor:
    """Return the mixed values [b h t p]: for each target a softmax over the edges that are left."""
    seen = record_hooks(mixer, x, ("rot_q", "rot_k", "attn_scores"))
    values = mixer.values(x)
    z = torch.zeros_like(values)
    for row, head, target in np.ndindex(*values.shape[:3]):
        scores = seen["attn_scores"][row, head, target]
        left = [
            s
            for s in range(target + 1)
            if scores[s] > -math.inf and not is_blocked(row, head, target, s, rows, heads)
        ]
        total = sum(math.exp(scores[s]) for s in left)
        for s in left:
            z[row, head, target] += math.exp(scores[s]) / total * values[row, head, s]
    return z


def loop_ssd(mixer: SSD, x: Tensor, rows, heads) -> Tensor:
    """Return the mixed values [b h t p]: a recurrence for each read, without what is blocked."""
    seen = record_hooks(mixer, x, ("log_decay", "C_rot", "ssm_write"))
    values = mixer.values(x)
    z = torch.zeros_like(values)
    for row, head, target in np.ndindex(*values.shape[:3]):
        group = head // (mixer.n_heads // mixer.n_groups)
        if mixer.groups == "tiled":
            group = head % mixer.n_groups
        state = torch.zeros_like(seen["ssm_write"][0, 0, 0])
        for s in range(target + 1):
            state = seen["log_decay"][row, s, head].exp() * state
            if not is_blocked(row, head, target, s, rows, heads):
                state = state + seen["ssm_write"][row, s, head]
        z[row, head, target] = state @ seen["C_rot"][row, target, group]
        if mixer.D is not None and not is_blocked(row, head, target, target, rows, heads):
            z[row, head, target] += mixer.D[head] * values[row, head, target]
    return z


SCOPES = pytest.mark.parametrize(
    ("rows", "heads"), [(None, None), ([0, 0, 2, 1, 1], None), ([2, 1, 0, 1, 0], [1])], ids=str
)


@SCOPES
@every_attention
@torch.no_grad()
def test_a_blocked_edge_is_none_before_the_softmax(mixer, rows, heads):
    layer = mixer()
    model = stack(layer)
    x = given(model)
    expected = layer.project(x, loop_attention(layer, x, rows, heads))
    targets, sources = zip(*EDGES, strict=True)
    with block_edges(model, 0, targets, sources, rows=rows, heads=heads):
        # fp64 throughout: what is left is rounding.
        torch.testing.assert_close(mixed(model), expected, rtol=1e-10, atol=1e-10)


@every_variant
@torch.no_grad()
def test_a_blocked_edge_of_an_ssd_is_one_read_without_one_write(options):
    layer = ssd_moved(**options)
    model = stack(layer)
    x = given(model)
    rows, heads = [0, 0, 2, 1, 1], [0, 2, 3]
    expected = layer.project(x, loop_ssd(layer, x, rows, heads))
    targets, sources = zip(*EDGES, strict=True)
    with block_edges(model, 0, targets, sources, rows=rows, heads=heads):
        torch.testing.assert_close(mixed(model), expected, rtol=1e-10, atol=1e-10)


@every_attention
@torch.no_grad()
def test_edges_and_hooks_in_one_mixer(mixer):
    """A hook sees the whole batch, and the edges act on what it left."""
    model = stack(mixer())
    names = ["blocks.0.mixer.hook_pattern", "blocks.0.mixer.hook_z"]
    with model.hooks([("blocks.0.mixer.hook_q", lambda q, hook: q / 2)]):
        _, plain = model.run_with_cache(TOKENS, names[0])
        with block_edges(model, 0, [5], [3]):
            _, cache = model.run_with_cache(TOKENS, names)
    pattern = plain[names[0]].clone()
    pattern[:, :, 5, 3] = 0
    pattern[:, :, 5] /= pattern[:, :, 5].sum(-1, keepdim=True)
    torch.testing.assert_close(cache[names[0]], pattern, rtol=1e-10, atol=1e-12)
    assert cache[names[1]].shape[:3] == (3, 9, 2)


@every_mixer
def test_gradients_pass_but_by_blocked_edges(mixer):
    """A token that reads itself alone gives gradient to itself alone, a convolution apart."""
    layer = mixer()
    model = stack(layer)
    x = given(model).detach().requires_grad_()
    with block_edges(model, 0, [5] * 5, range(5)):
        layer(x)[:, 5].square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    read = (x.grad != 0).any(-1).any(0).nonzero()[:, 0].tolist()
    assert read == ([2, 3, 4, 5] if getattr(layer, "position", None) == "conv" else [5])

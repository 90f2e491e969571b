"""Edited matrices and values: each against a loop that says what it means, and undone."""

import copy
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from analysis.interventions import block_edges, edit_matrix, swap_values
from lab.layers.attention import Attention
from lab.layers.mask import reveal_stored
from lab.models import Block, LanguageModel
from tests.intervened import (
    TOKENS,
    UserMixer,
    attention,
    every_mixer,
    given,
    mixed,
    stack,
)
from tests.ssd_variants import moved as ssd_moved


@every_mixer
@torch.no_grad()
def test_an_edited_matrix_is_applied_by_loops(mixer):
    layer = mixer()
    model = stack(layer)
    x = given(model)
    factor = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
    matrix, values = layer.matrix(x), layer.values(x)
    z = torch.zeros_like(values)
    for b, h, t in np.ndindex(*values.shape[:3]):
        for s in range(t):
            z[b, h, t] += factor[b] * matrix[b, h, t, s] * values[b, h, s]
    with edit_matrix(
        model, 0, lambda matrix, rows: factor[rows, None, None, None] * matrix.tril(-1)
    ):
        torch.testing.assert_close(mixed(model), layer.project(x, z), rtol=1e-10, atol=1e-10)


@every_mixer
@torch.no_grad()
def test_a_batch_by_few_rows_is_the_batch_at_once(mixer, monkeypatch):
    model = stack(mixer())
    edges = {"targets": [5, 4, 3], "sources": [2, 1, 0], "rows": [0, 2, 1]}

    def run() -> Tensor:
        with block_edges(model, 0, **edges), swap_values(model, 0, [0, 1, 2], [3, 2, 1]):
            return mixed(model)

    whole = run()
    monkeypatch.setattr("analysis.interventions.matrix.BLOCK_ENTRIES", 1)
    torch.testing.assert_close(run(), whole, rtol=1e-12, atol=1e-12)


@every_mixer
@torch.no_grad()
def test_swapped_values_are_read_where_the_other_stood(mixer):
    layer = mixer()
    model = stack(layer)
    x = given(model)
    first, second = [0, 3, 4], [2, 5, 4]
    matrix, values = layer.matrix(x), layer.values(x)
    z = torch.zeros_like(values)
    for b, h, t in np.ndindex(*values.shape[:3]):
        for s in range(t + 1):
            held = {first[b]: second[b], second[b]: first[b]}.get(s, s)
            z[b, h, t] += matrix[b, h, t, s] * values[b, h, held]
    with swap_values(model, 0, first, second):
        torch.testing.assert_close(mixed(model), layer.project(x, z), rtol=1e-10, atol=1e-10)


@every_mixer
def test_matrix_interventions_nest_and_undo(mixer):
    model = stack(mixer())
    before = copy.deepcopy(model.state_dict())
    methods = dict(vars(model.blocks[0].mixer))
    with torch.no_grad():
        plain = model(TOKENS)
        with block_edges(model, 0, [5, 6], [3, 3]):
            together = mixed(model)
        with block_edges(model, 0, [5], [3]), block_edges(model, 0, [6], [3]):
            torch.testing.assert_close(mixed(model), together, rtol=1e-12, atol=1e-12)
        with (
            swap_values(model, 0, [1, 1, 1], [2, 2, 2]),
            swap_values(model, 0, [1, 1, 1], [2, 2, 2]),
            edit_matrix(model, 0, lambda matrix, rows: 2 * matrix),
            edit_matrix(model, 0, lambda matrix, rows: matrix / 2),
        ):
            torch.testing.assert_close(model(TOKENS), plain, rtol=1e-10, atol=1e-10)
    with (
        pytest.raises(RuntimeError, match="stop"),
        block_edges(model, 0, [5], [3]),
        swap_values(model, 0, [1, 1, 1], [2, 2, 2]),
        edit_matrix(model, 0, lambda matrix, rows: matrix),
    ):
        raise RuntimeError("stop")
    assert torch.equal(model(TOKENS), plain)
    assert dict(vars(model.blocks[0].mixer)) == methods
    assert all(torch.equal(a, before[name]) for name, a in model.state_dict().items())


@torch.no_grad()
def test_an_oracle_mask_keeps_what_it_was_told():
    model = stack(attention(mask="oracle"))
    keep = torch.arange(9).remainder(2).eq(0).expand(3, -1)
    with reveal_stored(model, keep), edit_matrix(model, 0, lambda matrix, rows: matrix):
        edited = model(TOKENS)
    with reveal_stored(model, keep):
        torch.testing.assert_close(edited, model(TOKENS), rtol=1e-10, atol=1e-10)


@every_mixer
def test_an_edited_matrix_does_not_decode(mixer):
    model = stack(mixer())
    with (
        edit_matrix(model, 0, lambda matrix, rows: matrix),
        pytest.raises(ValueError, match="cannot decode"),
    ):
        model.generate(TOKENS, 1)


def test_an_edited_ssd_has_no_state():
    model = stack(ssd_moved())
    with (
        edit_matrix(model, 0, lambda matrix, rows: matrix),
        pytest.raises(ValueError, match="hook_ssm_write and hook_ssm_state: no hook"),
    ):
        model.run_with_cache(TOKENS, "blocks.0.mixer.hook_ssm_state")


@torch.no_grad()
def test_edges_in_a_training_loop_s_wrapped_mixer():
    """A mixer whose forward is already another gets that one back."""
    mixer = attention()
    model = stack(mixer)
    own = mixer.forward
    mixer.forward = lambda x, at=None: 2 * own(x, at)
    twice = mixed(model)
    with edit_matrix(model, 0, lambda matrix, rows: matrix):
        torch.testing.assert_close(mixed(model), twice / 2)
    assert torch.equal(mixed(model), twice)


class OwnAttention(Attention):
    """Somebody's own, whose forward is the prefill that an edited matrix refuses."""


@torch.no_grad()
def test_a_mixer_that_is_not_the_lab_s_may_decode_otherwise():
    layer = attention(OwnAttention)
    model = stack(layer)
    plain = model(TOKENS)
    with edit_matrix(model, 0, lambda matrix, rows: matrix):
        torch.testing.assert_close(model(TOKENS), plain, rtol=1e-10, atol=1e-10)
        with pytest.raises(ValueError, match="OwnAttention cannot decode"):
            model.prefill(TOKENS)
    model.prefill(TOKENS)


@pytest.mark.usefixtures("unchecked")  # the compiler cannot trace the tests' type checker
@torch.no_grad()
def test_matrices_are_edited_in_compiled_code():
    tokens = torch.tensor([[1, 2, 3, 4]])
    model = LanguageModel([Block(12, UserMixer(), None)], vocab_size=8, d_model=12)
    plain = model(tokens)
    with edit_matrix(model, 0, lambda matrix, rows: matrix / 2):
        halved = model(tokens)
    assert not torch.allclose(halved, plain)
    compiled = cast(nn.Module, torch.compile(model, backend="eager"))
    for outer in (model, compiled):
        torch.testing.assert_close(compiled(tokens), plain)
        with edit_matrix(outer, 0, lambda matrix, rows: matrix / 2):
            torch.testing.assert_close(compiled(tokens), halved)
    torch.testing.assert_close(compiled(tokens), plain)

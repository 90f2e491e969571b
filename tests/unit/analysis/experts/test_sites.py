"""Deletions are reruns with weights of zero; attributions are slopes."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from analysis.experts.sites import build_sites
from analysis.interventions import knock_out_experts
from analysis.scoring import scored
from lab.models import LanguageModel
from tests.expert_models import N, memory, small


@contextmanager
def silenced(model: LanguageModel, layer: int, deleted: Tensor) -> Iterator[None]:
    """Set weights to zero, one choice at a time."""

    def silence(weights: Tensor, point: object) -> Tensor:
        weights = weights.clone()
        for place in deleted.nonzero().tolist():
            weights[tuple(place)] = 0
        return weights

    with model.hooks([(f"blocks.{layer}.mlp.hook_expert_weights", silence)]):
        yield


@pytest.mark.parametrize("options", [{}, {"1.A.mask": "oracle"}], ids=["no mask", "oracle mask"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_deletion_is_the_rerun_with_that_weight_at_zero(layer, options):
    model, batch = small(options=options)
    site = build_sites(model, batch)[layer]
    for expert in range(site.n_experts):
        with knock_out_experts(model, layer, [expert]):
            expected = scored(model, batch)
        found = site.delete(site.select(expert))
        # The two sum the same terms in another order, in fp32.
        torch.testing.assert_close(found.losses, expected.losses, atol=1e-5, rtol=1e-5)
        assert (found.right == expected.right).all()


@pytest.mark.parametrize("layer", [0, 1])
def test_a_deletion_at_the_tokens_of_a_role_or_in_some_rows_spares_the_others(layer):
    model, batch = small()
    site = build_sites(model, batch)[layer]
    expert = int(site.counts.argmax())
    for role, rows in product((None, *range(4)), (None, torch.tensor([1, 4]))):
        deleted = site.select(expert, role, rows)
        for place in np.ndindex(*deleted.shape):
            b, t = place[:2]
            expected = int(site.indices[place]) == expert
            expected &= role is None or int(batch.roles[b, t]) == role
            expected &= rows is None or b in (1, 4)
            assert bool(deleted[place]) == expected
        with silenced(model, layer, deleted):
            losses = scored(model, batch).losses
        torch.testing.assert_close(site.delete(deleted).losses, losses, atol=1e-5, rtol=1e-5)


def test_rows_that_do_not_use_an_expert_keep_their_losses_to_the_bit():
    model, batch = small()
    for site in build_sites(model, batch):
        for expert in range(site.n_experts):
            found = site.delete(site.select(expert)).losses
            for i, row in enumerate(site.clean.rows.tolist()):
                if not (site.indices[row] == expert).any():
                    assert found[i] == site.whole.losses[i]


def test_counts_and_loads_are_loops_over_choices():
    model, batch = small()
    for site in build_sites(model, batch):
        counts, loads = np.zeros(site.n_experts), np.zeros(site.n_experts)
        for expert, weight in zip(
            site.indices.flatten().tolist(), site.weights.flatten().tolist(), strict=True
        ):
            counts[expert] += 1
            loads[expert] += abs(weight)
        np.testing.assert_array_equal(site.counts, counts)
        np.testing.assert_allclose(site.loads, loads)


@pytest.mark.parametrize("layer", [0, 1])
def test_attribution_is_the_slope_of_the_loss_as_a_choice_fades(layer):
    model, batch = small()
    model.double()
    site = build_sites(model, batch)[layer]
    found, step = site.attribute(), 1e-5
    for place in [(0, 0, 0, 0), (1, 5, 1, 1), (4, 11, 0, 1), (2, 8, 1, 0)]:
        losses = []
        for factor in (1 + step, 1 - step):

            def fade(
                weights: Tensor,
                point: object,
                factor: float = factor,
                place: tuple[int, ...] = place,
            ) -> Tensor:
                weights = weights.clone()
                weights[place] *= factor
                return weights

            with model.hooks([(f"blocks.{layer}.mlp.hook_expert_weights", fade)]):
                losses.append(scored(model, batch).losses.sum().item())
        assert found[place].item() == pytest.approx(
            (losses[1] - losses[0]) / (2 * step), rel=1e-4, abs=1e-8
        )


def test_deleting_an_expert_forgets_its_fact_and_no_other():
    model, batch = memory()
    site = build_sites(model, batch)[0]
    assert site.whole.right.all()
    asked = batch.inputs.flatten()
    for expert in range(N):
        found = site.delete(site.select(expert))
        assert (found.right == (asked != expert)).all()
        change = found.losses - site.whole.losses
        assert (change[asked == expert] > 1).all()
        assert (change[asked != expert] == 0).all()


def test_an_expert_that_is_read_though_nobody_chose_it_is_noticed():
    model, batch = small()
    site = build_sites(model, batch)[1]
    # As if its use had gone unseen.
    site.__dict__["counts"] = np.where(np.arange(15) == site.counts.argmax(), 0, site.counts)
    assert site.measure_unused() > 1e-4

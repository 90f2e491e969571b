"""Biases are means over rows, gradients those of the mean loss; a history follows its run."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis import dynamic_mask
from analysis.dynamic_mask.learning import BiasValues, MaskHistory, MaskTrajectory, read_masks
from analysis.dynamic_mask.masks import find_masked_layers, record_masked_layers
from lab.models.evaluation import score
from tasks.mqar import FILLER
from tests.unit.analysis.dynamic_mask.models import TASK, build_model, build_run, build_subject


@pytest.mark.parametrize("mask", ["literal", "straight-through", "soft", "value"])
def test_the_gradient_is_that_of_the_mean_loss(mask):
    built, batch = build_model(mask), TASK.batch(split="test", size=4)
    found = [mask.gradient for mask in read_masks(built, batch)]
    hidden, head, targets = score(built, batch, "fp32")
    torch.nn.functional.cross_entropy(hidden @ head.T, targets).backward()
    for (_, module), size in zip(find_masked_layers(built).items(), found, strict=True):
        grads = [p.grad for p in module.mask.parameters()]  # type: ignore[union-attr]
        expected = math.sqrt(sum(float((g**2).sum()) for g in grads if g is not None))
        assert size == pytest.approx(expected, rel=1e-4, abs=1e-9)
        assert (size == 0) == (mask == "literal")


def test_biases_are_means_over_rows_of_a_role_at_a_position():
    built = build_model("value")
    for module in find_masked_layers(built).values():
        torch.nn.init.constant_(module.mask.A, 1.0)  # type: ignore[union-attr, arg-type]
    of = build_subject(built)
    values = dynamic_mask.measure(of)[0]
    assert isinstance(values, BiasValues)
    bias = record_masked_layers(built, of.batch)[1].bias
    for t in range(16):
        for role in range(4):
            rows = (of.batch.roles[:, t] == role).nonzero()[:, 0]
            if not len(rows):
                assert np.isnan(values.bias[1, role, t])
                continue
            here = bias[rows, 0, t].double().numpy()
            assert values.bias[1, role, t] == pytest.approx(here.mean())
            assert values.spread[1, role, t] == pytest.approx(here.std(), abs=1e-6)
    fillers = bias[:, 0][of.batch.roles == FILLER].double().mean().item()
    assert values.bias_by_role[1, FILLER] == pytest.approx(fillers)


def test_history_follows_the_table(tmp_path):
    run = build_run(tmp_path, "soft")
    results = dynamic_mask.measure(replace(build_subject(run.load_model(4)), run=run))
    past, way = results[-1], results[-2]
    assert isinstance(past, MaskHistory)
    assert isinstance(way, MaskTrajectory)
    assert past.steps.tolist() == [0, 1, 2, 4]
    np.testing.assert_allclose(past.drifts, np.arange(4)[:, None] * [[0.1, 0.1]], atol=1e-6)
    assert (past.gradients > 0).all()
    assert past.figure().layout.yaxis.range[0] == past.figure().layout.yaxis2.range[0] == 0
    assert way.values.shape == (4, 2, 16)
    np.testing.assert_allclose(way.values[:, 0, 3], [1, 0.9, 0.8, 0.7], rtol=1e-6)
    assert (np.delete(way.values, 3, axis=2) == 1).all()

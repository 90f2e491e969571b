"""What is drawn of a matrix: no bright cell is lost, nothing shows above the diagonal."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from analysis import matrices, mixing
from analysis.base import Subject
from analysis.figures import picture
from analysis.figures.picture import Heatmap, draw_heatmap, make_picture, pool_matrix
from analysis.links import AnswerLinks
from analysis.mixing import BlockMixer
from lab.config import ModelConfig, TrainConfig
from lab.layers.mixer import adapt
from lab.models import build
from lab.training.run import Run
from tasks.mqar import MQAR

LINKS = AnswerLinks(np.array([4]), np.array([0]), np.array([1]))


def lower(matrix: np.ndarray) -> np.ndarray:
    return np.where(np.tri(*matrix.shape[1:], dtype=bool), matrix, np.nan)


def draw(matrix: np.ndarray, links: AnswerLinks) -> Any:
    tokens = np.arange(matrix.shape[1])
    shown = Heatmap(make_picture(matrix), links, tokens, 0 * tokens, ("key",))
    return draw_heatmap(shown).to_dict()


@pytest.mark.parametrize(("size", "pool"), [(8, 2), (9, 4), (7, 3), (5, 1)])
def test_pooling_is_the_loop_over_blocks(size, pool):
    matrix = lower(np.random.default_rng(0).normal(size=(2, size, size)))
    found = pool_matrix(matrix, pool)
    cells = -(-size // pool)
    assert found.shape == (2, cells, cells)
    for h, i, j in np.ndindex(found.shape):
        block = matrix[h, i * pool : (i + 1) * pool, j * pool : (j + 1) * pool]
        real = block[~np.isnan(block)]
        if real.size:
            assert found[h, i, j] == real[np.abs(real).argmax()]
        else:
            assert np.isnan(found[h, i, j])


class Shown(nn.Module):
    """A mixer whose matrix is given."""

    def __init__(self, weights: np.ndarray):
        super().__init__()
        self.weights = torch.from_numpy(np.nan_to_num(weights))

    def matrix(self, x):
        return self.weights[None].expand(len(x), -1, -1, -1)

    def values(self, x):
        return x[:, None]

    def project(self, x, z):
        return z[:, 0]


@pytest.mark.parametrize("entries", [64 * 64, 4 * 64 * 3, 1])
def test_a_large_matrix_is_pooled_to_pixels_and_cropped_where_queries_meet_values(
    monkeypatch, entries
):
    monkeypatch.setattr(picture, "SIDE", 16)
    monkeypatch.setattr(matrices, "CROP", 8)
    monkeypatch.setattr(mixing, "BLOCK_ENTRIES", entries)
    matrix = lower(np.random.default_rng(0).uniform(size=(1, 64, 64)).astype(np.float32))
    links = AnswerLinks(np.array([40, 41, 60]), np.array([9, 11, 20]), np.array([10, 12, 21]))
    mixer = BlockMixer(0, adapt(Shown(matrix)), torch.zeros(1, 64, 1))
    whole = matrices.view_whole(mixer)
    assert whole.pool == 4
    np.testing.assert_array_equal(whole.weights, pool_matrix(matrix, 4))
    size = np.nan_to_num(matrix[0]) / np.nansum(matrix[0], axis=1, keepdims=True)
    found, uniform = matrices.measure_mass(mixer, links), 1 / np.arange(1, 65)
    for rows, columns, share, expected in (
        (links.queries, links.values, found.on_value, found.uniform_value),
        (links.values, links.keys, found.written, found.uniform_written),
        (np.arange(1, 64), np.arange(63), found.on_previous, found.uniform_previous),
    ):
        assert share[0] == pytest.approx(size[rows, columns].mean(), rel=1e-5)
        assert expected == pytest.approx(uniform[rows].mean())
    crop = matrices.view_crop(mixer, whole, links)
    row, column = crop.first
    assert crop.pool == 1
    assert row <= 40 < 41 < row + 8
    assert column <= 10 < 12 < column + 8
    np.testing.assert_array_equal(crop.weights[0], matrix[0, row : row + 8, column : column + 8])


def test_colours_are_symmetric_where_anything_is_negative():
    positive = lower(np.full((1, 8, 8), 0.5))
    assert not make_picture(positive).signed
    signed = positive.copy()
    signed[0, 4, 4] = -2.0
    assert make_picture(signed).signed
    colors = draw(signed, LINKS)["layout"]["coloraxis"]
    assert colors["cmin"] == -colors["cmax"]


@pytest.mark.parametrize(("heads", "across"), [(1, 1), (4, 2), (5, 3)])
def test_every_head_has_a_square_panel(heads, across):
    matrix = lower(np.random.default_rng(0).uniform(size=(heads, 8, 8)))
    figure = draw(matrix, LINKS)
    maps = [trace for trace in figure["data"] if trace["type"] == "heatmap"]
    assert len(maps) == heads
    domains = set()
    for trace in maps:
        x = figure["layout"][trace["xaxis"].replace("x", "xaxis")]
        y = figure["layout"][trace["yaxis"].replace("y", "yaxis")]
        assert y["scaleanchor"] == trace["xaxis"]
        assert y["range"][0] > y["range"][1]
        domains.add((tuple(x["domain"]), tuple(y["domain"])))
    assert len(domains) == heads
    assert len({horizontal for horizontal, _ in domains}) == across


def test_other_rows_and_training_steps_can_be_chosen(tmp_path):
    task = MQAR(seq_len=16, vocab_size=32)
    run = Run(tmp_path / "run", task, ModelConfig(stack="SM AM", d_model=16), TrainConfig())
    before, after = run.load_model(0), run.load_model(0)
    with torch.no_grad():
        for weight in after.parameters():
            weight.mul_(1.5)
    batch = task.batch(split="test", size=6)
    for found in matrices.measure(Subject(task, after, batch, step=5, run=run)):
        rows = [f"test row {i}" for i in range(matrices.ROWS)]
        assert [*found.views] == [*rows, "test row 0, step 0"]
        for name, model, row in (("test row 2", after, 2), ("test row 0, step 0", before, 0)):
            (alone,) = (
                other
                for other in matrices.measure(Subject(task, model, batch[row : row + 1]))
                if other.layer == found.layer
            )
            assert alone.views == {}
            shown, own = found.views[name], alone.picture
            assert own is not None
            np.testing.assert_array_equal(shown.picture.weights, own.weights)
            np.testing.assert_array_equal(shown.tokens, batch.inputs[row].numpy())
        figure: Any = found.figure()
        assert [view["name"] for view in figure.layout.meta["views"]] == [*found.views]


def test_there_are_fewer_views_of_large_matrices(monkeypatch):
    task = MQAR(seq_len=16, vocab_size=32)
    model = build("AM", vocab_size=32, d_model=16).eval()
    subject = Subject(task, model, task.batch(split="test", size=6))
    for cells, views in ((3 * 16 * 16, 3), (16 * 16, 0)):
        monkeypatch.setattr(matrices, "VIEWED", cells)
        assert len(matrices.measure(subject)[0].views) == views

"""A model that reads vectors: its map, its numbers, decoding, and what it refuses."""

from typing import Any

import pytest
import torch

from lab.models import build
from lab.models.anatomy import dissect
from lab.models.evaluation import check_sizes, evaluate, score
from lab.models.vector_model import VectorModel
from lab.ops.squared_error import linear_squared_error
from tasks.mqar import MQAR
from tasks.regression import Regression

TASK = Regression(seq_len=12, n_dims=3)


def model(stack: str = "AM SM") -> VectorModel:
    found = build(stack, **TASK.sizes, d_model=16)
    assert isinstance(found, VectorModel)
    return found.eval()


@torch.no_grad()
def test_it_answers_with_numbers_and_decodes_vector_by_vector():
    given, vectors = model(), TASK.batch(size=3).inputs
    answers, cache = given.run_with_cache(vectors)
    assert answers.shape == (3, 12, 1)
    hidden = cache["hook_embed"]
    assert torch.equal(hidden, vectors @ given.embed.weight.T + given.embed.bias)
    torch.testing.assert_close(answers, given.hidden(vectors) @ given.W_U)
    assert set(given.matrices(vectors)) == {0, 1}
    found, state = given.prefill(vectors[:, :5])
    for t in range(5, 12):
        answer, state = given.step(vectors[:, t], state)
        found = torch.cat([found, answer[:, None]], 1)
    torch.testing.assert_close(found, answers, rtol=1e-4, atol=1e-5)


def test_a_vector_s_length_is_not_lost_in_the_norms():
    given = model("AM")
    vectors = torch.zeros(2, 1, 4)
    vectors[:, 0, 3] = torch.tensor([1.0, 2.0])
    one, other = given(vectors)
    assert (one - other).abs() > 1e-4


def test_its_loss_is_the_squared_error_at_scored_positions():
    given, batch = model(), TASK.batch(size=5)
    loss, explained = linear_squared_error(*score(given, batch, "fp32"))
    answers, right = given(batch.inputs)[batch.scored], batch.targets[batch.scored]
    torch.testing.assert_close(loss, (answers - right).square().mean())
    total = right.square().sum() - (answers - right).square().sum()
    torch.testing.assert_close(explained, total, rtol=1e-4, atol=1e-4)


def test_explained_variance_is_a_share_of_what_the_oracle_explains():
    given = model()
    found = evaluate(TASK, given, rows=50, rows_at_once=20, seed=0)
    batch = TASK.batch(split="test", size=50)
    y, best = batch.targets[batch.scored], TASK.oracle(batch)[batch.scored]
    with torch.no_grad():
        wrong = (given(batch.inputs)[batch.scored] - y).square()
    share = (y.square() - wrong).sum() / (y.square() - (best - y).square()).sum()
    assert found.accuracy == pytest.approx(max(0.0, share.item()), abs=1e-5)
    assert found.loss == pytest.approx(wrong.mean().item(), rel=1e-5)
    assert (found.rows, found.scored) == (50, 300)
    assert 0 <= found.interval[0] <= found.accuracy <= found.interval[1] <= 1


def test_its_parts_are_counted():
    found = dissect(model())
    assert (found.embedding.name, found.embedding.parameters) == ("Linear", 16 * 4 + 16)
    assert found.embedding.note == "4 numbers × 16"
    assert found.total == model().parameter_count()
    assert model().cfg.d_vocab == 0


def test_wrong_inputs_sizes_and_tasks_are_named(unchecked):
    given, tokens = model(), build("AM", vocab_size=32, d_model=16)
    for wrong, words in (
        (torch.zeros(2, 3, dtype=torch.int64), r"must be floats \[b t 4\], got int64 \[2, 3\]"),
        (torch.zeros(2, 3, 5), r"must be floats \[b t 4\], got float32 \[2, 3, 5\]"),
        ([[1.0]], r"must be a tensor \[b t 4\], got a list"),
    ):
        with pytest.raises(ValueError, match=f"vectors: {words}"):
            given(wrong)
    with pytest.raises(ValueError, match="answers with numbers, and generates no tokens"):
        given.generate(torch.zeros(1, 2, 4), 3)
    with pytest.raises(ValueError, match="regression has rows of vectors, the model reads tokens"):
        check_sizes(TASK, tokens)
    with pytest.raises(ValueError, match="mqar has rows of tokens, the model reads vectors"):
        check_sizes(MQAR(), given)
    with pytest.raises(ValueError, match="d_input=6 of the task must be 4, the model's"):
        check_sizes(Regression(n_dims=5), given)
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "vocab_size=None: must be a whole number"),
        ({"d_input": 4}, "d_output=None: must be a whole number"),
        ({"d_input": 0, "d_output": 1}, "d_input=0: must be ≥ 1"),
        ({"vocab_size": 8, "d_input": 4, "d_output": 1}, "vocab_size=8: must not be given where"),
    ]
    for sizes, words in refused:
        with pytest.raises(ValueError, match=words):
            build("AM", **sizes, d_model=16)

"""The ladder of constructions, and constructions as a start for training."""

import sys

import pytest
import torch

from lab.config import ModelConfig, TrainConfig
from lab.constructions import CannotError, construct, ladder, rung
from lab.models.evaluation import score
from lab.ops.cross_entropy import linear_cross_entropy
from lab.training.loop import fit, start
from tasks.copying import Copy
from tasks.flip_flop import FlipFlop
from tasks.induction import Induction
from tasks.mqar import MQAR
from tasks.word_problem import WordProblem

RECALL = MQAR(seq_len=64, vocab_size=256)
TRIGGER = Induction(seq_len=64)
ONCE = Copy(seq_len=64, repeats=False)


def test_the_ladder_of_mqar_has_a_rung_for_each_mixer_and_mask():
    rungs = ladder(RECALL, test_rows=4)
    assert [(rung.mixer, rung.outcome) for rung in rungs[:2]] == [
        ("attention, no mask", "solves"),
        ("attention + literal mask", "solves"),
    ]
    assert [rung.outcome for rung in rungs] == ["solves"] * 15 + ["not built"]
    assert all((rung.accuracy == 1) == (rung.outcome == "solves") for rung in rungs)
    assert rungs[12].options == {"S.position": "rope"}
    assert rungs[12].stack == "SM*2"
    assert "in no order" in rungs[15].because
    assert not any(rung.outcome in rung.because for rung in rungs)
    assert "every answer of 4 rows" in rungs[13].because


def test_the_ladder_says_how_many_answers_are_right_where_a_few_are_missed():
    found = rung(ONCE, ModelConfig(stack="SM*2"), mixer="SSD", test_rows=64)
    assert found.outcome == "solves"
    assert found.accuracy is not None
    assert 0.99 <= found.accuracy < 1
    assert found.because.startswith(f"{100 * found.accuracy:.2f} % of the answers of 64 rows")


def test_the_ladder_of_parity_says_what_is_proven():
    rungs = ladder(WordProblem(group="Z2", seq_len=16), d_model=16, test_rows=8)
    assert [rung.outcome for rung in rungs] == ["cannot"] * 12 + ["solves"] * 4
    assert [rung.accuracy for rung in rungs] == [None] * 12 + [1.0] * 4


def test_what_is_no_layer_is_a_rung_and_what_is_no_stack_an_error():
    rungs = ladder(TRIGGER, d_model=4, n_heads=4, test_rows=1)
    assert {rung.outcome for rung in rungs[:12]} == {"no such model"}
    assert "must be even for position='rope'" in rungs[0].because
    with pytest.raises(ValueError, match="unknown transform 'Q'"):
        ladder(TRIGGER, transform="Q")
    with pytest.raises(ValueError, match="multiple of n_heads=5"):
        ladder(TRIGGER, n_heads=5)


def test_a_task_without_constructions_has_an_empty_ladder():
    task = FlipFlop()
    assert ladder(task) == []
    with pytest.raises(ValueError, match="task=flip_flop: no construction is built, known: mqar, "):
        construct(task, ModelConfig())

    with pytest.raises(ValueError, match="task=flip_flop: no construction is built"):
        rung(task, ModelConfig(), mixer="attention")


def test_a_bug_in_setting_weights_is_no_outcome(monkeypatch):
    def broken(*args):
        raise ValueError("a bug")

    monkeypatch.setattr("lab.constructions.recall.solve", broken)
    with pytest.raises(ValueError, match="a bug"):
        rung(RECALL, ModelConfig(), mixer="attention", test_rows=1)


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        ("NM", "no weights solve the task in this model: no mixer"),
        ("AM", "are known for this model: one mixer"),
    ],
)
def test_a_refusal_alone_says_its_outcome(stack, words):
    with pytest.raises(CannotError, match=words) as refused:
        construct(RECALL, ModelConfig(stack=stack))
    found = rung(RECALL, ModelConfig(stack=stack), mixer="one")
    assert (found.outcome, found.because) == (refused.value.outcome, refused.value.reason)


START = [
    (RECALL, ModelConfig()),
    (RECALL, ModelConfig(stack="IE*2", options={"I.mask": "value"})),
    (RECALL, ModelConfig(stack="SM*2", options={"S.position": "conv"})),
    (RECALL, ModelConfig(stack="SE IE", n_heads=2)),
    (TRIGGER, ModelConfig(stack="SM*2")),
    (RECALL, ModelConfig(stack="SM*2")),
    (RECALL, ModelConfig(stack="SM*2", options={"S.position": "decay"})),
    (Copy(seq_len=32, repeats=False), ModelConfig(stack="SM*2")),
    (WordProblem(group="Z2", seq_len=16), ModelConfig(stack="SM*2")),
]


@pytest.mark.parametrize(("task", "config"), START, ids=str)
def test_a_construction_stays_right_while_it_trains_at_the_default_rate(task, config):
    training = TrainConfig(max_steps=5, eval_every=5, test_rows=64, batch_size=16)
    state = start(construct(task, config), training, "fp32")
    before = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    rows = list(fit(task, state, training))
    assert rows[-1].test_accuracy is not None
    assert rows[-1].test_accuracy >= 0.99
    moved = [name for name, p in state.model.named_parameters() if not torch.equal(p, before[name])]
    assert len(moved) > len(before) / 2


def test_gradient_reaches_all_but_what_a_silent_transform_hides():
    model = construct(RECALL, ModelConfig(stack="AM*2", options={"A.mask": "soft"}))
    hidden, weight, targets = score(model, RECALL.batch(size=16), "fp32")
    linear_cross_entropy(hidden, weight, targets)[0].backward()
    still = {
        name for name, p in model.named_parameters() if p.grad is None or not p.grad.norm() > 0
    }
    # The last map of each MLP is zero: it moves first, what is before it next.
    assert still == {f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("mlp.up", "norm_mlp")}


def test_a_model_that_cannot_take_a_row_does_not_end_the_ladder(monkeypatch):
    def refuse(*given, **more):
        raise ValueError("position 8192 is beyond the mask's table")

    monkeypatch.setattr(sys.modules["lab.constructions.ladder"], "evaluate", refuse)
    found = rung(TRIGGER, ModelConfig(stack="AM*2"), mixer="attention")
    assert (found.outcome, found.accuracy) == ("no such model", None)
    assert "beyond the mask's table" in found.because

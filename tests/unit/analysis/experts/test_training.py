"""How experts came about: from planted histories, step 0 included."""

import numpy as np
import pytest
import torch

from analysis.base import NotApplicableError, Subject
from analysis.experts.load import ExpertChoices, find_expert_layers
from analysis.experts.training import (
    measure,
    measure_membership,
)
from lab.config import ModelConfig, TrainConfig
from lab.layers.retrieval import RetrievedExperts
from lab.training.checkpoint import keep_weights
from lab.training.run import Run
from tasks.mqar import MQAR
from tests.unit.analysis.cases.experts import choose

TASK = MQAR(seq_len=16, vocab_size=32)
OPTIONS = {"E.n_experts": 42, "E.k": 3, "E.n_retrieval_heads": 2}


def run(path, stack: str = "AE", **options) -> Run:
    config = ModelConfig(stack=stack, d_model=16, options={**OPTIONS, **options})
    made = Run(path / "run", TASK, config, TrainConfig(seed=3))
    made.claim()
    return made


def subject(of: Run) -> Subject:
    return Subject(TASK, of.build().eval(), TASK.batch(split="test", size=200), run=of)


def test_zero_keys_are_a_collapse_at_step_0_and_keys_end_it(tmp_path):
    made = run(tmp_path, **{"E.key_init": "zeros"})
    model = made.build()
    (module,) = find_expert_layers(model).values()
    assert isinstance(module, RetrievedExperts)
    for seed, keys in enumerate((module.row_keys, module.column_keys)):
        torch.nn.init.normal_(keys, generator=torch.Generator().manual_seed(seed))
    keep_weights(made, 10, model)
    keep_weights(made, 20, model)
    (course,) = measure(subject(made))
    assert course.steps.tolist() == [0, 10, 20]
    assert course.standing[0, 0] == 1
    assert course.standing[0, -1] < 0.5
    assert course.effective[0, 0] == pytest.approx(3)
    assert course.effective[0, -1] > 10
    assert course.saturation[0, 1:].tolist() == [1, 1]
    assert course.saturation[0, 0] < 0.5
    assert course.saturation_uniform.tolist() == [3 / 42]
    row = course.numbers().rows[0]
    assert row[3].startswith("100.0 % → ")
    assert row[4] == "from step 10"


def test_membership_is_of_the_most_loaded():
    def leading(first: int) -> ExpertChoices:
        indices = np.full((20, 1, 2), first, np.int32) + np.arange(2, dtype=np.int32)
        indices[0] = [8, 9]
        return choose(indices, 10)

    assert measure_membership(leading(1), leading(1)) == 1
    assert measure_membership(leading(1), leading(2)) == pytest.approx(1 / 3)
    assert measure_membership(leading(1), leading(3)) == 0


def test_where_there_is_no_course(tmp_path):
    made = run(tmp_path)
    with pytest.raises(NotApplicableError, match="one step only"):
        measure(subject(made))
    lonely = subject(made)
    with pytest.raises(NotApplicableError, match="no run"):
        measure(Subject(TASK, lonely.model, lonely.batch))
    plain_run = Run(tmp_path / "other", TASK, ModelConfig(stack="AM", d_model=16), TrainConfig())
    with pytest.raises(NotApplicableError, match="no block chooses among experts"):
        measure(subject(plain_run))

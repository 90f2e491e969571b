"""CPU seconds of a step: its own and its validation's, not the test's and not the waiting."""

import time

import pytest

from lab.config import TrainConfig
from lab.machine.clocks import Spent, read_clocks
from lab.models import build
from lab.models.evaluation import Evaluation
from lab.training import stepper, validation
from lab.training.fit import fit
from lab.training.metrics import Metrics
from lab.training.state import start
from tasks.mqar import MQAR


def test_the_processor_does_not_count_waiting():
    began = read_clocks()
    time.sleep(0.1)
    spent = read_clocks() - began
    assert spent.wall >= 0.1
    assert spent.cpu < 0.1
    assert (Spent(3.0, 1.0) + Spent(1.0, 1.0)) / 2 == Spent(2.0, 1.0)


def test_a_step_counts_its_validation_and_not_its_test(monkeypatch):
    clock = {"cpu": 0.0}

    def evaluate(*args, split="test", **kwargs):
        clock["cpu"] += {"validation": 5.0, "test": 7.0}[split]
        return Evaluation(loss=0.0, accuracy=0.995, interval=(0.9, 1.0), scored=8, rows=4)

    def differentiate(*args, **kwargs):
        clock["cpu"] += 1.0
        return known(*args, **kwargs)

    known = stepper.differentiate
    monkeypatch.setattr(validation, "evaluate", evaluate)
    monkeypatch.setattr(stepper, "differentiate", differentiate)
    for module in (stepper, validation):
        monkeypatch.setattr(module, "read_clocks", lambda: Spent(0.0, clock["cpu"]))
    task = MQAR(seq_len=8, vocab_size=16)
    config = TrainConfig(batch_size=2, max_steps=2, eval_every=2)
    state = start(build("AN", vocab_size=16, d_model=4), config)
    rows = list(fit(task, state, config, "fp32"))
    assert [row.cpu_seconds for row in rows] == [1.0, 6.0]
    assert rows[1].test_accuracy == 0.995


@pytest.mark.parametrize(("spent", "total"), [((1.5, 2.0), 3.5), ((1.5, None), None)])
def test_steps_without_cpu_seconds_have_no_sum(spent, total):
    rows = [{"step": 1} | ({} if each is None else {"cpu_seconds": each}) for each in spent]
    assert Metrics(tuple(rows)).cpu_seconds == total

"""Small work runs on one thread of the CPU, and the caller's number of threads stays."""

import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lab.config import TrainConfig
from lab.models import build
from lab.models.evaluation import evaluate
from lab.training.optimizers import build_optimizers
from tasks import one_thread
from tasks.dataset import Rows
from tasks.mqar import MQAR
from tasks.one_thread import use_one_thread
from tasks.reader import BatchReader


@pytest.fixture(autouse=True)
def _several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


class Observed(MQAR):
    """A task that notes on how many threads its rows and their links are drawn."""

    seen: ClassVar[list[int]] = []

    def generate(self, split, numbers, seed):
        self.seen.append(torch.get_num_threads())
        return super().generate(split, numbers, seed)

    def _make_links(self, slot, point, spare_pos):
        self.seen.append(torch.get_num_threads())
        return super()._make_links(slot, point, spare_pos)


class Watch(TorchDispatchMode):
    """Notes on how many threads each of torch's operations runs."""

    def __init__(self):
        super().__init__()
        self.threads = defaultdict(set)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.threads[str(func.overloadpacket)].add(torch.get_num_threads())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def task():
    Observed.seen.clear()
    return Observed(seq_len=16, vocab_size=64)


def count_mkl_threads():
    """Return how many threads MKL takes for a product; None where torch has no MKL."""
    found = re.search(r"mkl_get_max_threads\(\) : (\d+)", torch.__config__.parallel_info())
    return found and int(found[1])


def test_rows_and_their_links_are_drawn_on_one_thread(task):
    dict(task.batch(size=4).links)
    BatchReader(task, size=2).read(0)
    next(iter(Rows(task, batch_size=2)))
    assert task.seen == [1, 1, 1, 1]
    assert torch.get_num_threads() == 3


def test_rows_do_not_depend_on_threads():
    task = MQAR(seq_len=2048, vocab_size=8192)  # more than torch shares among threads
    drawn = task.batch(size=32)
    shared = task.generate("train", torch.arange(32), 0)
    for part in ("inputs", "targets", "roles"):
        assert getattr(drawn, part).equal(getattr(shared, part))


def test_a_model_is_evaluated_and_updated_on_one_thread():
    task, model = MQAR(seq_len=16, vocab_size=64), build("AM", vocab_size=64, d_model=16, seed=0)
    with Watch() as evaluation:
        evaluate(task, model, rows=4, rows_at_once=4, seed=0)
    assert evaluation.threads["aten.mm"] == {1}
    optimizers = build_optimizers(model, TrainConfig(optimizer="muon"))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with Watch() as update:
        for optimizer in optimizers.values():
            optimizer.step()
    assert update.threads["aten.baddbmm"] == update.threads["aten._fused_adamw_"] == {1}
    assert torch.get_num_threads() == 3


def test_products_run_on_one_thread_too():
    before = count_mkl_threads()
    with use_one_thread():
        assert count_mkl_threads() in (None, 1)
    assert count_mkl_threads() == before


def test_the_callers_threads_are_back_after_an_error(task, monkeypatch):
    monkeypatch.setattr(MQAR, "generate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        task.batch(size=1)
    assert task.seen == [1]
    assert torch.get_num_threads() == 3


@pytest.mark.skipif(
    one_thread._find_setters()[0] is torch.set_num_threads,
    reason="torch's library does not show OpenMP's own function here",
)
def test_other_python_threads_keep_theirs():
    with ThreadPoolExecutor(1) as earlier, ThreadPoolExecutor(1) as later:
        earlier.submit(torch.get_num_threads).result()  # a thread's first operation sets its number
        earlier.submit(torch.set_num_threads, 2).result()
        torch.set_num_threads(3)
        with use_one_thread():
            assert earlier.submit(torch.get_num_threads).result() == 2
            assert later.submit(torch.get_num_threads).result() == 3
            assert torch.get_num_threads() == 1
        assert later.submit(torch.get_num_threads).result() == 3


def test_nothing_changes_while_torch_compiles(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with use_one_thread():
        assert torch.get_num_threads() == 3

"""What memory a run will take, against what it is measured to take."""

import resource

import pytest
import torch

from lab.config import ModelConfig, TrainConfig
from lab.machine.allocation import Allocations, OverLimitError, measure_peak
from lab.machine.growth import TOKENS
from lab.machine.memory import DoesNotFitError, measure_free_memory
from lab.models.memory import count_bytes, refuse_weights
from lab.training.footprint import AHEAD, check_step, count_fitting_lanes, estimate
from lab.training.gradients import differentiate, differentiate_lanes
from lab.training.runs import Run
from lab.training.state import start
from tasks import TASKS
from tasks.reader import BatchReader, count_tokens_ahead
from tasks.schedule import LARGEST, Schedule
from tests.faults.attempt import attempt


def make(tmp_path, batch_size=64, stack="AM*2", d_model=32, **task) -> Run:
    sizes = {"seq_len": 64, "vocab_size": 256, **task}
    train = TrainConfig(batch_size=batch_size)
    return Run(tmp_path, TASKS["mqar"](**sizes), ModelConfig(stack=stack, d_model=d_model), train)


def test_tensors_are_counted_while_they_live():
    with Allocations() as allocations:
        one = torch.zeros(1000)
        view = one[:10]
        torch.ones(500)
    assert (allocations.live, allocations.peak) == (4000, 6000)
    assert view.sum() == 0
    with pytest.raises(OverLimitError, match="tensors take"), Allocations(100):
        torch.zeros(100)


@pytest.mark.parametrize(("stack", "sizes"), [("AM*2", {}), ("SE IE", {"vocab_size": 1024})])
def test_a_step_of_many_rows_takes_what_small_ones_foretell(tmp_path, stack, sizes):
    run = make(tmp_path, batch_size=256, stack=stack, **sizes)
    found = estimate(run, run.build(), TOKENS)
    many = make(tmp_path, batch_size=8, stack=stack, **sizes)
    exact = estimate(many, many.build())
    assert exact.step.fixed == 0
    model = run.build()

    def step():
        from lab.models.evaluation import score
        from lab.ops.cross_entropy import linear_cross_entropy

        hidden, weight, targets = score(model, run.task.batch(size=256), "fp32")
        linear_cross_entropy(hidden, weight, targets)[0].backward()

    taken = measure_peak(step)
    assert found.step.count_bytes(256) == pytest.approx(taken, rel=0.25)
    # Where a step is small enough, it is measured whole.
    whole = estimate(run, run.build())
    assert whole.step.count_bytes(256) == pytest.approx(taken, rel=0.01)


def test_a_run_that_small_steps_would_refuse_is_measured_on_larger_ones(tmp_path):
    run = make(tmp_path, batch_size=512, stack="SM", seq_len=64, vocab_size=1024)
    weights = sum(p.nbytes for p in run.build().parameters())
    coarse = estimate(run, run.build(), TOKENS).total - weights
    fine = estimate(run, run.build()).total - weights
    assert fine < 0.95 * coarse
    check_step(run, run.build(), fine)


def test_the_moments_of_every_optimizer_count(tmp_path):
    run = make(tmp_path, batch_size=8, vocab_size=2048)
    model = run.build()
    found, state = estimate(run, model), start(model, run.train)
    differentiate(model, run.task.batch(size=8), "fp32")
    for optimizer in state.optimizers.values():
        optimizer.step()
    each = [opt.state.values() for opt in state.optimizers.values()]
    moments = sum(t.nbytes for states in each for held in states for t in held.values())
    assert len(each) == 2  # AdamW and Muon
    assert found.kept == found.weights + moments + AHEAD * count_tokens_ahead(run.task, 8)


VARIED = [("mqar", {"fillers": ("any", "fresh", "zero")}), ("fuzzy", {"n_pairs": (2, 4)})]


@pytest.mark.parametrize(("name", "varied"), [*((name, {}) for name in TASKS), *VARIED])
def test_rows_drawn_ahead_take_no_more_than_is_counted(name, varied):
    task = TASKS[name](**{**TASKS[name].presets["small"].options, **varied})
    size = 4096 // task.seq_len
    # What later rows share is not counted. An oracle mask reads the links of such tasks.
    reads_links = {"key_pos", "value_pos"} <= task.batch(size=1).links.keys()
    reader = BatchReader(task, size=size)
    with Allocations() as held:
        for start in range(0, 100 * size, size):
            batch = reader.read(start)
            if reads_links:
                dict(batch.links)
        assert held.live <= AHEAD * (count_tokens_ahead(task, size) + size * task.seq_len)


@pytest.mark.parametrize("stack", ["AM*2", "SM*2"])
def test_lanes_take_what_one_run_foretells(tmp_path, stack):
    run = make(tmp_path, batch_size=16, stack=stack)
    estimate(run, run.build())  # the first step of a length makes tables that others share
    found, models = estimate(run, run.build()), [run.build() for _ in range(4)]
    batches = [run.task.batch(size=16, seed=z) for z in range(4)]
    peak = measure_peak(lambda: differentiate_lanes(models, batches, "fp32"))
    step = 4 * (found.step.count_bytes(16) + found.weights)
    assert step == pytest.approx(peak, rel=0.25)
    assert found.count_lanes(4) >= 4 * found.kept + step
    need = found.count_lanes(3)
    assert [count_fitting_lanes(run, 8, free) for free in (need, need - 1, 0)] == [3, 2, 1]
    assert count_fitting_lanes(run, 2, need) == 2


def test_refusals_name_the_largest_that_fits(tmp_path):
    run = make(tmp_path)
    need = estimate(run, run.build()).total
    weights = sum(p.nbytes for p in run.build().parameters())
    check_step(run, run.build(), need - weights)
    with pytest.raises(DoesNotFitError, match=r"batch_size=64, .*; batch_size=\d+ would fit"):
        check_step(run, run.build(), need - weights - 1_000_000)
    config = ModelConfig(d_model=2**17)
    assert count_bytes(config, 256) > 2**38
    with (
        pytest.raises(DoesNotFitError, match=r"the weights take .* d_model=\d+ would fit"),
        refuse_weights(config, 256),
    ):
        raise AssertionError("the weights are counted before")


def test_a_limit_of_the_process_counts_as_free_memory():
    assert "left True" in attempt(_print_whether_less_is_left, memory=1).text


def _print_whether_less_is_left() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    print("left", measure_free_memory() < most)


def test_where_the_system_does_not_tell_what_is_free_all_counts(monkeypatch):
    """As on macOS, which has neither /proc nor a number of free pages."""
    pages = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr("lab.machine.memory._read", lambda file: "")
    monkeypatch.setattr("os.sysconf_names", dict.fromkeys(pages, 0))
    monkeypatch.setattr("os.sysconf", pages.__getitem__)
    assert measure_free_memory() == 1000 * 4096


def test_a_schedule_is_counted_and_not_listed():
    assert Schedule(1, 10**9, rows=10).stages == 10**9
    with pytest.raises(ValueError, match="make 1000000000 settings together"):
        TASKS["hops"](hops=Schedule(1, 10**9, rows=10))
    for bad in ({"first": "1"}, {"last": LARGEST + 1}, {"rows": 1.5}):
        with pytest.raises(ValueError, match="must be"):
            Schedule(**{"first": 1, "last": 2, "rows": 10, **bad})


def test_a_row_that_does_not_fit_alone_is_refused_with_a_length_that_does(tmp_path):
    run = make(tmp_path, batch_size=1, d_model=256, seq_len=2048, vocab_size=4096)
    need = estimate(run, run.build()).total
    words = r"training takes about .* are free; one row of [\d,]+ tokens would fit"
    with pytest.raises(DoesNotFitError, match=words):
        check_step(run, run.build(), need // 8 * 7)


def test_a_step_that_measuring_shows_too_large_is_refused(tmp_path, monkeypatch):
    run = make(tmp_path)
    coarse = estimate(run, run.build(), TOKENS)

    def measure(run, model, tokens=0, limit=0.0):
        if tokens == TOKENS:
            return coarse
        raise OverLimitError(int(limit) + 1)

    monkeypatch.setattr("lab.training.footprint.estimate", measure)
    with pytest.raises(DoesNotFitError, match=r"batch_size=63 would fit"):
        check_step(run, run.build(), coarse.total)


def test_a_step_that_cannot_even_be_measured_is_refused_in_one_line(tmp_path, monkeypatch):
    def measure(run, model, tokens=0, limit=0.0):
        raise OverLimitError(int(limit) + 1)

    monkeypatch.setattr("lab.training.footprint.estimate", measure)
    run = make(tmp_path)
    with pytest.raises(DoesNotFitError, match=r"takes .* or more, .* free; shorter rows may fit"):
        check_step(run, run.build(), 1000)

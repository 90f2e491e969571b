"""How memory grows with rows, measured on few of them, against what many and long ones take."""

import pytest
import torch

from lab.machine.allocation import OverLimitError, measure_peak, measure_whole_peak
from lab.machine.growth import (
    MANY_TOKENS,
    TOKENS,
    Demand,
    Growth,
    check_demand,
    estimate_closely,
    measure_growth,
)
from lab.machine.memory import DoesNotFitError
from tasks.base import Batch
from tasks.flip_flop import FlipFlop

INT = 8


def double(batch: Batch) -> torch.Tensor:
    """Take as many bytes again as the inputs have, and a constant number more."""
    held = torch.zeros(1000)
    return (batch.inputs + 1) * held.numel()


def square(batch: Batch) -> torch.Tensor:
    """Take the square of the row length."""
    return batch.inputs[:, :, None] * batch.inputs[:, None]


@pytest.mark.parametrize("rows", [3, 1000])
def test_many_rows_take_what_few_foretell(rows):
    task = FlipFlop(seq_len=64)
    found = measure_growth(task, rows, double)
    taken = measure_peak(lambda: double(task.batch(size=rows)))
    assert found.count_bytes(rows) == pytest.approx(taken, rel=0.01)
    assert found.count_fitting_rows(found.count_bytes(rows) + 1) == rows


def test_long_rows_take_what_their_ends_foretell():
    task = FlipFlop(seq_len=1024)
    found = measure_growth(task, 1, square, tokens=64)
    assert found.count_bytes(1) == pytest.approx(INT * 1024**2, rel=0.05)
    assert 500 < found.find_longest_row(INT * 512**2) <= 520
    whole = measure_growth(task, 1, square, tokens=64, whole=True)
    assert whole.count_bytes(1) == pytest.approx(measure_peak(lambda: square(task.batch(size=1))))


def test_a_bend_between_short_lengths_is_no_curve():
    def call(batch: Batch) -> torch.Tensor:
        return torch.zeros(10 * batch.inputs.shape[1] + (1000 if batch.inputs.shape[1] > 64 else 0))

    found = measure_growth(FlipFlop(seq_len=2**16), 1, call, tokens=64)
    assert found.square == 0
    assert found.count_bytes(1) == pytest.approx(40 * 2**16, rel=0.2)


def test_lists_of_python_count_beside_tensors():
    def call() -> None:
        numbers = list(range(1000, 101_000))
        torch.tensor(numbers)

    assert measure_peak(call) == 100_000 * INT
    # A list has a pointer for each of its numbers, and a number takes 28 bytes or 32.
    assert 100_000 * (8 + 28 + INT) <= measure_whole_peak(call) <= 100_000 * (9 + 32 + INT)


def test_what_lists_take_before_a_tensor_is_made_is_not_added_to_it():
    def call() -> None:
        sum(list(range(1000, 101_000)))
        torch.zeros(1_000_000, dtype=torch.int64)

    assert measure_whole_peak(call) == pytest.approx(1_000_000 * INT, rel=0.05)


def test_a_refusal_names_bytes_and_the_longest_row():
    task = FlipFlop(seq_len=64)
    growth = Growth(fixed=0, line=2**20, square=0, seq_len=64)

    def estimate(tokens: int, limit: float) -> Demand:
        return Demand(fixed=2**20, rows=2, growth=growth, fragments=1.0)

    check_demand("work", task, estimate, free=129 * 2**20)
    words = "seq_len=64: .* work takes about 129 MiB, 40 MiB are free; rows of 39 tokens would fit"
    with pytest.raises(DoesNotFitError, match=words):
        check_demand("work", task, estimate, free=40 * 2**20)


def test_what_small_calls_would_refuse_is_measured_on_larger_ones():
    asked = []

    def estimate(tokens: int, limit: float) -> Demand:
        asked.append(tokens)
        return Demand(2000 / len(asked), 1, Growth(0, 0, 0, 1))

    check_demand("work", FlipFlop(seq_len=64), estimate, free=1000)
    assert asked == [2**10, 2**13]


@pytest.mark.parametrize("stopped", [TOKENS, MANY_TOKENS])
def test_work_that_cannot_even_be_measured_is_refused_without_a_length(stopped):
    def estimate(tokens: int, limit: float) -> Demand:
        if tokens == stopped:
            raise OverLimitError(5000)
        return Demand(400, 1, Growth(0, 0, 0, 1))

    found = estimate_closely(estimate, FlipFlop(seq_len=64), 1000)
    assert (found.bytes, found.stopped) == (5000, True)
    assert (found.estimate is None) == (stopped == TOKENS)
    words = "work takes 4.88 KiB or more, 1e\\+03 bytes are free; shorter rows may fit"
    with pytest.raises(DoesNotFitError, match=words):
        check_demand("work", FlipFlop(seq_len=64), estimate, free=1000)

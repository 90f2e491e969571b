"""The benchmarks compare like with like: both sides do the same work."""

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lab.bench import kernels, roofline, rows
from lab.bench.generator import TASK, draw_usual_rows
from lab.bench.peak import measure_peak_mib
from lab.bench.products import (
    Product,
    count_flops,
    find_products,
    record_products,
    time_products,
)
from lab.bench.ratio import Ratio, time_in_turns, time_median
from lab.bench.roofline import Rates, Roofline, measure_rates, prepare_calls
from lab.bench.step import compute_usual_logits
from lab.bench.traffic import record_traffic, time_traffic
from lab.models import build
from lab.peers import MissingPeerError
from tasks import TASKS
from tasks.mqar import MQAR


def test_the_usual_step_computes_the_same_logits():
    model = build("AM*2", vocab_size=64, d_model=16)
    tokens = MQAR(seq_len=16, vocab_size=64).batch(size=3).inputs
    torch.testing.assert_close(
        compute_usual_logits(model, tokens), model(tokens), rtol=1e-5, atol=1e-5
    )


def test_the_usual_generator_draws_rows_that_our_oracle_answers():
    state = np.random.get_state()  # noqa: NPY002
    np.random.seed(0)  # noqa: NPY002
    inputs, targets = draw_usual_rows(TASK, 2)
    np.random.set_state(state)  # noqa: NPY002
    assert inputs.shape == targets.shape == (2, 2048)
    scored = targets != -100
    assert scored.sum(1).tolist() == [512, 512]
    batch = TASK.batch(size=1)
    answers = TASK.oracle(type(batch)(inputs, targets, batch.roles.expand(2, -1), {}))
    assert torch.equal(answers[scored], targets[scored])


def test_rows_of_every_task_are_timed_at_both_sizes(monkeypatch):
    def time_once(ours, theirs):
        ours()
        theirs()
        return 1.0, 2.0

    monkeypatch.setattr(rows, "time_in_turns", time_once)
    monkeypatch.setattr(rows, "ROWS", 1)
    found = rows.measure()
    assert {line.name.split(",")[0] for line in found} == set(TASKS)
    # Twice the time for four times the tokens, and for sixteen times the vocabulary.
    assert {line.ratio for line in found} == {2.0, 0.5}


def test_products_of_forward_and_backward_are_counted():
    x, y = torch.ones(3, 4, 5, requires_grad=True), torch.ones(3, 5, 6, requires_grad=True)
    products = record_products(lambda: (x @ y).sum().backward())
    assert products == {Product(3, 4, 5, 6): 1, Product(3, 4, 6, 5): 1, Product(3, 5, 4, 6): 1}
    assert count_flops(products) == 3 * 2 * 3 * 4 * 5 * 6
    linear = torch.nn.Linear(5, 7)
    assert record_products(lambda: linear(torch.ones(4, 5))) == {Product(1, 4, 5, 7): 1}
    assert time_products({Product(2, 256, 256, 256): 8}) > time_products({Product(1, 8, 8, 8): 1})


def test_products_of_causal_attention_are_half_of_all():
    q, k, v = (torch.randn(2, 3, 8, 4, requires_grad=True) for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    forward = record_products(lambda: attend(q, k, v, is_causal=True))
    both = record_products(lambda: attend(q, k, v, is_causal=True).sum().backward())
    assert count_flops(forward) == 2 * (2 * 6 * 8 * 8 * 4) / 2
    assert count_flops(both) == 3.5 * count_flops(forward)


def test_traffic_counts_what_is_read_and_written_but_no_views_and_products():
    x, table = torch.ones(64, 16), torch.ones(1000, 4)

    def call():
        y = x + x[0]  # 4,096 and 64 bytes in, 4,096 out; the row is a view
        y.mul_(2)  # 4,096 in, 4,096 out
        torch.mm(y.T, x)
        table.index_select(0, torch.tensor([3]))  # 8 bytes of index, 16 of a row twice

    found = record_traffic(call)
    assert found[2 * 4096 + 64] == 1
    assert found[3 * 4096] == 0
    assert found[2 * 4096] == 1
    assert found[8 + 2 * 16] == 1
    assert time_traffic({2**24: 4}) > time_traffic({2**10: 1}) > 0


F32 = 4
"""Bytes of a number."""


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x, i: torch.empty_like(x), 0),
        (lambda x, i: x.view(-1)[3:], 0),
        (lambda x, i: x.fill_(1), 64 * F32),
        (lambda x, i: x.normal_(), 64 * F32),
        (lambda x, i: torch.zeros_like(x), 64 * F32),
        (lambda x, i: x.copy_(torch.empty(16, 4)), 2 * 64 * F32),
        (lambda x, i: torch.add(x, 1, out=torch.empty(16, 4)), 2 * 64 * F32),
        (lambda x, i: torch.ops.aten._foreach_add_.Scalar([x, x], 1.0), 4 * 64 * F32),
        (lambda x, i: F.embedding(i, x), 3 * 8 + 2 * 12 * F32),
        (lambda x, i: F.embedding_bag(i[None], x, mode="sum"), 3 * 8 + 8 + (12 + 4) * F32),
        (lambda x, i: x.index_add_(0, i, torch.empty(3, 4)), 3 * 8 + 2 * 12 * F32),
        (lambda x, i: x.scatter_(0, i[None], torch.empty(1, 3)), 3 * 8 + 2 * 3 * F32),
    ],
)
def test_traffic_of_operations(call, expected):
    x, picked = torch.ones(16, 4), torch.tensor([3, 1, 3])
    found = record_traffic(lambda: call(x, picked))
    # Helpers inside a call, such as the offsets of bags, move less than half of what it does.
    assert max(found, default=0) == expected


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("place", ["", "_for_cpu"])
def test_attentions_of_every_device_are_products(kernel, place):
    q, k, v = torch.ones(2, 3, 8, 4), torch.ones(2, 3, 8, 4), torch.ones(2, 3, 8, 4)
    name = f"_scaled_dot_product_{kernel}_attention{place}"
    assert count_flops(Counter(find_products(name, (q, k, v)))) == 2 * (2 * 6 * 8 * 8 * 4) / 2
    backward = Counter(find_products(f"{name}_backward", (q, q, k, v)))
    assert sum(backward.values()) == 5
    assert count_flops(backward) == 2.5 * (2 * (2 * 6 * 8 * 8 * 4) / 2)


def test_products_that_add_in_place_are_counted():
    x = torch.ones(4, 4)
    assert record_products(lambda: x.addmm_(x, x)) == {Product(1, 4, 4, 4): 1}


def test_an_operation_takes_its_arithmetic_its_memory_or_a_kernel_whichever_is_most():
    x, y = torch.ones(8, 8), torch.ones(8, 8)
    rates = Rates({torch.float32: 2 * 8**3 / 5.0}, bytes=3 * 256 / 2.0, smallest=0.5)
    with Roofline(rates) as least:
        z = x @ y  # 5 s of products; 768 bytes, 2 s
        z.T.add_(1)  # a view is free; 512 bytes, 4/3 s
        z[:1, :6].neg_()  # 48 bytes, 1/8 s
    assert least.seconds == pytest.approx(5 + 4 / 3 + 1 / 8)
    assert least.kernel_seconds == pytest.approx(5 + 4 / 3 + 1 / 2)
    assert least.operations == 3


@pytest.mark.parametrize("stack", ["AM*2", "SM*2", "SE IE"])
def test_a_step_called_for_its_roofline_trains(stack):
    cpu = torch.device("cpu")
    calls = prepare_calls((stack, 16, 64, 2), "bf16", cpu)
    rates = Rates(dict.fromkeys((torch.float32, torch.bfloat16), 1e15), 1e12, 1e-6)
    with Roofline(rates) as least:
        calls()
    assert 0 < least.seconds < least.kernel_seconds
    assert least.kernel_seconds < 2e-6 * least.operations


def test_rates_are_work_over_time(monkeypatch):
    monkeypatch.setattr(roofline, "time_products", lambda products, device: 2.0)
    monkeypatch.setattr(roofline, "time_traffic", lambda traffic, device: 4.0)
    monkeypatch.setattr(roofline, "time_alone", lambda call, device: call() or 5.0)
    rates = measure_rates(torch.device("cpu"))
    products = 2 * roofline.MATRIX_SIZE**3 / 2.0
    assert rates.flops == dict.fromkeys((torch.float32, torch.bfloat16), products)
    assert rates.bytes == 2 * roofline.COPIED_BYTES / 4.0
    assert rates.smallest == 5.0 / roofline.SMALL_KERNELS
    assert "1 in float32, 1 in bfloat16 TFLOP/s; 0.00 TB/s; smallest kernel 5000.0" in str(rates)


def test_kernels_are_compared_on_the_recurrence_of_all_inputs():
    given = ((1, 8, 2, 4, 4), torch.float64, torch.device("cpu"))
    first, second = (kernels.prepare("torch", *given)() for _ in range(2))
    assert kernels.compare_numbers(first, second) == 0
    assert len(first) == 6  # y, and the gradients of x, dt, A, B and C
    assert all(z.isfinite().all() and z.abs().min() > 0 for z in first[1:])


def test_numbers_that_differ_are_seen_wherever_they_are():
    right = [torch.ones(2), torch.tensor([1.0, 4.0])]
    assert kernels.compare_numbers(right, [torch.ones(2), torch.tensor([2.0, 4.0])]) == 0.25
    assert math.isnan(kernels.compare_numbers(right, [right[0], torch.tensor([1.0, math.nan])]))


def test_kernels_that_cannot_run_are_named(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "_compare", lambda kernel, shape, dtype: [kernel])
    why = {"fla": "no gradients", "mamba_ssm": None}
    backends = {name: SimpleNamespace(missing=lambda device, n=name: why[n]) for name in why}
    monkeypatch.setattr(kernels, "BACKENDS", backends)
    assert {*kernels.measure()} == {"mamba_ssm"}
    assert capsys.readouterr().err == "fla: no gradients\n"
    why["mamba_ssm"] = "not there"
    with pytest.raises(MissingPeerError, match="mamba_ssm: not there; fla: no gradients"):
        next(iter(kernels.measure()))


def allocate_64_mib():
    return lambda: torch.ones(2**24)


def test_peak_memory_sees_what_a_call_allocates():
    assert 60 < measure_peak_mib(allocate_64_mib) < 90


def test_times_are_medians_of_calls_taken_in_turn():
    calls = []
    ours, theirs = time_in_turns(lambda: calls.append("ours"), lambda: calls.append("theirs"), 3)
    assert calls == ["ours", "theirs"] * 4
    assert min(ours, theirs) >= 0
    assert time_median(lambda: None, 3) < 1


@pytest.mark.parametrize(
    ("ratio", "target", "reached"), [(2.0, 2.0, True), (1.9, 2.0, False), (0.1, None, True)]
)
def test_a_missed_promise_says_so(ratio, target, reached):
    line = Ratio("thing", 2.0, 1.0, "rows/s", ratio, target)
    assert line.reached == reached
    assert ("MISSED" in str(line)) == (not reached)


def test_a_ratio_as_a_row_of_a_table():
    line = Ratio("a|b", 2.0, 1.0, "ms", 0.5, 2.0, "a note")
    assert line.to_markdown() == r"| a\|b | 2 | 1 | ms | 0.5 | 2, missed | a note |"
    reported = Ratio("thing", 2000.0, 1.0, "ms", 0.5, None)
    assert reported.to_markdown() == "| thing | 2,000 | 1 | ms | 0.5 |  |  |"

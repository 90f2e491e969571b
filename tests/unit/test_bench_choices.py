"""What a run chooses against each fixed choice: which is compared with which, and what is timed."""

from multiprocessing import Pipe

import pytest

from lab.bench import choices
from lab.bench.choices import FixedChoice, compare_with_best, compare_with_former
from lab.machine.spinning import CHOICES

FP32, BF16 = FixedChoice("brief", "fp32", 1), FixedChoice("brief", "bf16", 2)
LONG = FixedChoice("long", "fp32", 2)


def plant(**seconds: float) -> dict[FixedChoice, list[float]]:
    """Times of three rounds, the last of which is disturbed."""
    named = {"fp32": FP32, "bf16": BF16, "long": LONG}
    return {named[name]: [each, each, 5 * each] for name, each in seconds.items()}


@pytest.mark.parametrize(
    ("chosen", "ratio", "reached"), [(LONG, 1.0, True), (FP32, 1 / 1.04, True), (BF16, 0.5, False)]
)
def test_a_choice_is_compared_with_the_fastest(chosen, ratio, reached):
    found = compare_with_best("here", plant(fp32=0.104, bf16=0.2, long=0.1), chosen)
    assert found.ratio == pytest.approx(ratio)
    assert found.reached == reached
    assert "fp32, 2 threads, long waits 100, fp32, 1 thread 104, bf16" in found.note


@pytest.mark.parametrize(
    ("bf16", "target", "reached"), [(0.3, 2.2, True), (0.15, 2.2, False), (0.09, 1.0, False)]
)
def test_the_former_default_is_to_be_beaten_where_bf16_is_slow(bf16, target, reached):
    found = compare_with_former("here", plant(fp32=0.104, bf16=bf16, long=0.1), LONG)
    assert found.target == target
    assert found.ratio == pytest.approx(bf16 / 0.1)
    assert found.reached == reached


def test_every_choice_is_listed_once(monkeypatch):
    monkeypatch.setattr(choices, "list_precisions", lambda device: ("fp32", "bf16"))
    monkeypatch.setattr(choices, "list_thread_counts", lambda device: [1, 2])
    found = choices.list_choices()
    assert len({*found}) == len(found) == 2 * (1 + len(CHOICES))


def test_a_process_chooses_and_times_steps(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choices, "SETTINGS", (("AM", 8, 32, 4),))
    monkeypatch.setattr(choices, "SECONDS", 0.001)
    monkeypatch.setattr("lab.training.step_time.SECONDS", 0)
    ours, theirs = Pipe()
    for order in ((0, None), (0, FP32), (0, FP32), None):
        ours.send(order)
    choices.serve(theirs)
    (precision, threads), *seconds = (ours.recv() for _ in range(3))
    assert precision in ("fp32", "bf16")
    assert threads >= 1
    assert all(0 < each < 10 for each in seconds)
    assert len(seconds) == 2


def test_the_wait_is_the_one_that_a_command_chooses(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = "print('measuring'); print('1000')"
    monkeypatch.setattr(choices, "FIND_WAIT", program)
    assert choices._find_wait() == "brief"
    monkeypatch.setattr(choices, "FIND_WAIT", program.replace("1000", "None"))
    assert choices._find_wait() == "long"

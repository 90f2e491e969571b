"""How long threads spin: measured once a machine, left to the user, brief wherever in doubt."""

import os
import sys

import pytest

from lab.machine import processor, spinning
from lab.machine.measurements import read
from lab.machine.spinning import BRIEF, VARIABLES, choose_wait, wait_briefly


@pytest.fixture(autouse=True)
def _idle(monkeypatch, tmp_path):
    """A machine with two idle cores, before torch is imported."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(processor, "count_cores", lambda: 2)
    monkeypatch.setattr(processor, "is_busy", lambda: False)
    monkeypatch.setattr(spinning, "IS_LEFT_TO_USER", False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")


def plant(monkeypatch, brief: float, long: float) -> list[bool]:
    """Let a step take so many seconds with each wait; returns what was measured."""
    asked = []

    def time_steps(variables) -> float:
        asked.append(variables == BRIEF)
        return brief if variables == BRIEF else long

    monkeypatch.setattr(spinning, "_time_steps", time_steps)
    return asked


def choose() -> list[str]:
    notes = []
    choose_wait(notes.append)
    return notes


@pytest.mark.parametrize(
    ("brief", "long", "chosen"),
    [(1.0, 0.7, None), (1.0, 0.96, "1000"), (0.7, 1.0, "1000")],
)
def test_the_faster_wait_is_set_and_remembered(monkeypatch, brief, long, chosen):
    asked = plant(monkeypatch, brief, long)
    assert choose() == ["measuring this machine, once: a few seconds"]
    assert os.environ.get("GOMP_SPINCOUNT") == chosen
    wait_briefly()
    assert choose() == []
    assert os.environ.get("GOMP_SPINCOUNT") == chosen
    assert asked == [True, False]


def test_a_measurement_that_failed_is_not_remembered(monkeypatch):
    plant(monkeypatch, float("inf"), float("inf"))
    choose()
    assert os.environ.get("GOMP_SPINCOUNT") == "1000"
    assert read("spinning") == {}


HINDRANCES = {
    "busy": (processor, "is_busy", lambda: True),
    "one core": (processor, "count_cores", lambda: 1),
    "no Linux": (sys, "platform", "darwin"),
    "the user's choice": (spinning, "IS_LEFT_TO_USER", True),
    "torch is imported": (sys, "modules", {**sys.modules, "torch": None}),
}


@pytest.mark.parametrize("hindrance", HINDRANCES)
def test_the_wait_stays_as_it_is_where_it_cannot_be_chosen(monkeypatch, hindrance):
    asked = plant(monkeypatch, 1.0, 0.5)
    monkeypatch.setattr(*HINDRANCES[hindrance])
    assert choose() == asked == []
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
    assert read("spinning") == {}


def test_a_long_wait_that_is_known_is_not_set_beside_other_work(monkeypatch):
    plant(monkeypatch, 1.0, 0.5)
    choose()
    wait_briefly()
    monkeypatch.setattr(*HINDRANCES["busy"])
    choose()
    assert os.environ["GOMP_SPINCOUNT"] == "1000"


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    monkeypatch.setattr(*HINDRANCES["the user's choice"])
    wait_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == "77"


def test_the_workload_prints_its_seconds(monkeypatch):
    # Three steps in place of sixty.
    few = spinning.WORKLOAD.replace("range(60)", "range(3)").replace("times[10:])[25]", "times)[1]")
    monkeypatch.setattr(spinning, "WORKLOAD", few)
    assert 0 < spinning._time_steps(BRIEF) < 10


def test_a_workload_that_fails_takes_for_ever(monkeypatch):
    monkeypatch.setattr(spinning, "WORKLOAD", "raise SystemExit(1)")
    assert spinning._time_steps(BRIEF) == float("inf")

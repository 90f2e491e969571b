"""Schedule "error": the rate by the share of wrong answers, halved where they get no fewer."""

from dataclasses import asdict

import pytest

from lab.training.loop import MOST_HALVINGS, PATIENCE, Annealing


def observe(shares: list[float]) -> Annealing:
    annealing = Annealing()
    for wrong in shares:
        annealing.observe(wrong)
    return annealing


@pytest.mark.parametrize(
    ("wrong", "share"), [(1.0, 1.0), (0.1, 1.0), (0.025, 0.5), (0.001, 0.1), (0.0, 0.1)]
)
def test_the_rate_follows_the_root_of_the_share_of_wrong_answers(wrong, share):
    assert observe([wrong]).share == pytest.approx(share)


def test_the_rate_is_halved_when_no_validation_is_better_for_long_enough():
    hovering = [0.025] * PATIENCE  # the first is the best so far, and waits for nothing
    assert observe(hovering).share == pytest.approx(0.5)
    assert observe([*hovering, 0.025]).share == pytest.approx(0.25)
    assert observe([*hovering, 0.0249]).share == pytest.approx(0.25, rel=1e-2)  # may be luck
    assert observe([*hovering, 0.0225]).share == pytest.approx(0.474, rel=1e-2)
    # Halved once, and the wait begins again.
    assert observe([*hovering, 0.025, *hovering[1:]]).halvings == 1
    assert observe([*hovering, *hovering, 0.025]).halvings == 2


def test_a_halved_rate_stays_halved_when_answers_get_better():
    assert observe([0.025] * (PATIENCE + 1) + [0.016]).share == pytest.approx(0.2)


def test_a_run_without_wrong_answers_is_not_slowed():
    assert observe([0.02, *[0.0] * 100]).halvings == 0
    assert observe([0.0, *[0.001, 0.0] * 100]).halvings == 0  # never in a row
    assert observe([0.0, *[0.001] * PATIENCE]).halvings == 1
    interrupted = observe([0.02, *[0.0] * 10])
    resumed = Annealing(**asdict(interrupted))
    resumed.observe(0.0)
    assert resumed == observe([0.02, *[0.0] * 11])


def test_what_has_much_to_learn_is_not_slowed_and_no_rate_falls_for_ever():
    assert observe([0.3] * 100).share == 1.0
    assert observe([0.05] * 1000).halvings == MOST_HALVINGS
    assert observe([0.09, *[0.2, 0.09] * 100]).halvings == 0  # never in a row

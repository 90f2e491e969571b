"""The learning rate of a step; with schedule "error" it falls as the model learns."""

import math
from dataclasses import dataclass

from lab.config import TrainConfig

BELOW, LEAST = 0.1, 0.1
"""The rate falls below this share of wrong answers, down to this share of the peak; halvings come
on top."""
GAIN = 0.05
"""Wrong answers must fall by this share to count as a new best: less may be luck."""
PATIENCE = 4
"""Validations in a row below `BELOW` without a new best, after which the rate is halved."""
MOST_HALVINGS = 3


@dataclass
class Annealing:
    """What the validations at the full row length have shown so far.

    The rate is in proportion to the root of the share of wrong answers, from the peak at 10 % of
    them down to a tenth of it: what is left to learn decides when the noise of large steps is in
    the way, not the number of steps. A run whose answers get no better at that rate has it halved,
    unless all are right.

    Attributes:
        wrong: share of wrong answers in the last validation; 1 before.
        least: the last new best.
        waits: validations since then, since the rate was last halved, or since too many answers
            or none were wrong.
        halvings: how often the rate was halved.
    """

    wrong: float = 1.0
    least: float = 1.0
    waits: int = 0
    halvings: int = 0

    def observe(self, wrong: float) -> None:
        """Take in the share of wrong answers of another validation."""
        self.wrong = wrong
        if wrong < (1 - GAIN) * self.least:
            self.least, self.waits = wrong, 0
        elif wrong == 0 or wrong >= BELOW:  # nothing, or much, is left to learn
            self.waits = 0
        elif self.halvings < MOST_HALVINGS:
            self.waits += 1
            if self.waits == PATIENCE:
                self.halvings, self.waits = self.halvings + 1, 0

    @property
    def share(self) -> float:
        """The rate, as a share of its peak."""
        return min(1.0, max(LEAST, math.sqrt(self.wrong / BELOW))) * 0.5**self.halvings


def compute_learning_rate(config: TrainConfig, step: int, annealed: float = 1.0) -> float:
    """Return the rate of a step (from 1): a linear warm-up, then the configuration's schedule.

    It is constant, or a cosine down to a tenth of the peak, or "error" (`Annealing`).

    Args:
        config: how to train.
        step: its number.
        annealed: share of the peak that schedule "error" asks for.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if config.schedule == "error":
        return peak * annealed
    if config.schedule == "constant":
        return peak
    progress = (step - warmup) / max(1, config.max_steps - warmup)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))

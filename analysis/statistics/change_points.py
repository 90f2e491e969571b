"""When does a series by training step change? One split into two levels, with its bracket."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

MOVES = 0.1
"""The least range that counts as a move, in the series' unit: shares of 1, or nats."""
FALSE_ALARMS = 0.01
"""The share of series of white noise, and of random walks, that may pass for a change."""
NOISES = 2000
"""Series of each that a bound is read off."""
FEWEST = 4
"""Fewest steps that a change can be told from."""


@dataclass(frozen=True)
class Change:
    """A series' change from one level to another.

    Attributes:
        step: half-way, on a logarithmic axis, between the two steps the split falls between.
        low: the change comes after this kept step …
        high: … and by this one: the neighbours of the split, and of its resamples (95 %).
        begins: the last step before it at which a tenth of the change is not yet made.
        ends: the first step after it at which nine tenths are made; None when that never comes.
        before: the level before, in the series' unit.
        after: the level after.
    """

    step: float
    low: int
    high: int
    begins: int
    ends: int | None
    before: float
    after: float

    @property
    def size(self) -> float:
        """How far apart the two levels are."""
        return abs(self.after - self.before)

    def precedes(self, other: "Change") -> bool:
        """Whether it comes before another one for certain: their brackets do not overlap."""
        return self.high <= other.low


def find_change_point(
    steps: Int[np.ndarray, " n"],
    values: Float[np.ndarray, " n"],
    bound: float,
    resampled: Float[np.ndarray, "r n"] | None = None,
) -> Change | None:
    """Return the change of a series, or None where there is none that can be dated.

    The split that leaves the least squared distance to the means of its two sides,

        min over i of  Σ_{j≤i} w_j (y_j − μ_before)² + Σ_{j>i} w_j (y_j − μ_after)²,

    with w_j the stretch of log₂(1 + step) that step j stands for, so that steps kept more densely
    around a jump count no more than others. Of a single step up or down it is the step; of a ramp,
    its middle. Its levels are means of all that lies on a side, not the two ends, and it needs
    neither a monotone series nor a smoothing width.

    It is a change if the series `moves`, and its two levels differ by more standard deviations of
    what is left around them than those of white noise and of random walks do. A series that goes
    evenly from one end to the other, or wanders, has moved, but at no one time.

    Args:
        steps: ascending, ≥ 0.
        values: the series.
        bound: of these steps, `estimate_noise_bound`.
        resampled: the same series on rows drawn again: the bracket holds 95 % of their splits.

    Raises:
        ValueError: for fewer than `FEWEST` steps.

    Source: the least-squares split of Hinkley, Biometrika 57 (1970), 1, with weights.
    """
    _check(steps)
    weights = weigh_steps(steps)
    [at] = _splits(weights, values[None])
    [[before, after]], [clear] = _levels(weights, values[None], np.array([at]))
    if not (moves(values) and clear > bound):
        return None
    splits = np.array([at]) if resampled is None else _splits(weights, resampled)
    first, last = np.quantile(splits, [0.025, 0.975], method="closest_observation").astype(int)
    made = (values - before) / (after - before)
    early = np.flatnonzero(made[: at + 1] < 0.1)
    late = np.flatnonzero(made[at + 1 :] > 0.9)
    return Change(
        step=float(np.sqrt((1.0 + steps[at]) * (1.0 + steps[at + 1])) - 1),
        low=int(steps[min(at, first)]),
        high=int(steps[max(at, last) + 1]),
        begins=int(steps[early[-1]] if early.size else steps[0]),
        ends=int(steps[at + 1 + late[0]]) if late.size else None,
        before=float(before),
        after=float(after),
    )


def moves(values: Float[np.ndarray, " n"]) -> bool:
    """Whether a series' values lie `MOVES` apart or more; when it does so is another question."""
    return bool(np.ptp(values) >= MOVES)


def estimate_noise_bound(steps: Int[np.ndarray, " n"], rng: np.random.Generator) -> float:
    """Return how many standard deviations the levels of series without a change differ by.

    That is, those of the best split; all but `FALSE_ALARMS` of two kinds of series stay below it:
    white noise, what a few rows do to a quantity that stays the same, and random walks along
    log₂(1 + step), what a quantity does that drifts at all times alike. A drift that is smoother
    than a walk yet bends is not among them; of a straight one the levels are √12 apart, which is
    below.

    Raises:
        ValueError: for fewer than `FEWEST` steps.
    """
    _check(steps)
    weights, noise = weigh_steps(steps), rng.normal(size=(NOISES, len(steps)))
    strides = rng.normal(size=(NOISES, len(steps) - 1)) * np.sqrt(np.diff(np.log2(1.0 + steps)))
    walks = np.pad(strides.cumsum(-1), ((0, 0), (1, 0)))
    return max(
        float(np.quantile(_levels(weights, null, _splits(weights, null))[1], 1 - FALSE_ALARMS))
        for null in (noise, walks)
    )


def weigh_steps(steps: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Return how much of log₂(1 + step) each step stands for: half-way to its neighbours."""
    position = np.log2(1.0 + steps)
    edges = np.concatenate([position[:1], (position[1:] + position[:-1]) / 2, position[-1:]])
    return np.diff(edges)


def _splits(
    weights: Float[np.ndarray, " n"], series: Float[np.ndarray, "r n"]
) -> Int[np.ndarray, " r"]:
    """Return the last index before the best split of each series."""
    weight = weights.cumsum()
    total = (weights * series).cumsum(-1)
    left, right = weight[:-1], weight[-1] - weight[:-1]
    # The least distance within two groups is the most between their means.
    apart = total[:, :-1] / left - (total[:, -1:] - total[:, :-1]) / right
    return (left * right * apart**2).argmax(-1)


def _levels(
    weights: Float[np.ndarray, " n"],
    series: Float[np.ndarray, "r n"],
    splits: Int[np.ndarray, " r"],
) -> tuple[Float[np.ndarray, "r 2"], Float[np.ndarray, " r"]]:
    """Return the levels before and after a split, and their distance in standard deviations."""
    sides = np.arange(len(weights)) <= splits[:, None]
    levels = np.stack(
        [(weights * side * series).sum(-1) / (weights * side).sum(-1) for side in (sides, ~sides)],
        axis=-1,
    )
    fitted = np.where(sides, levels[:, :1], levels[:, 1:])
    spread = np.sqrt(np.average((series - fitted) ** 2, axis=-1, weights=weights))
    move = np.abs(levels[:, 1] - levels[:, 0])
    return levels, np.divide(move, spread, out=np.full_like(move, np.inf), where=spread > 0)


def _check(steps: Int[np.ndarray, " n"]) -> None:
    if len(steps) < FEWEST:
        raise ValueError(f"steps={len(steps)}: must be ≥ {FEWEST}")

"""Find when a series by training step changes: the best split into two levels, with a bracket."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

MOVES = 0.1
"""The least range that counts as a move, in the series' unit: shares of 1, or nats."""
FALSE_ALARMS = 0.01
"""Share of white-noise series, and of random walks, in which a change may be found."""
NOISES = 2000
"""Simulated series of each kind behind a bound."""
FEWEST = 4
"""Minimum number of steps in which a change can be found."""


@dataclass(frozen=True)
class Change:
    """A series' change from one level to another.

    Attributes:
        step: half-way between the two steps around the split, on a logarithmic axis.
        low: the change comes after this step …
        high: … and by this one. They enclose the split, and 95 % of its resamples.
        begins: the last step before the split with less than a tenth of the change.
        ends: the first step after the split with more than nine tenths of it; None if none has.
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
        """The distance of the two levels."""
        return abs(self.after - self.before)

    def precedes(self, other: "Change") -> bool:
        """Whether it certainly comes before another change: the brackets do not overlap."""
        return self.high <= other.low


def find_change_point(
    steps: Int[np.ndarray, " n"],
    values: Float[np.ndarray, " n"],
    bound: float,
    resampled: Float[np.ndarray, "r n"] | None = None,
) -> Change | None:
    """Return the change of a series, or None if it has none that can be dated.

    The split is the one with the least squared distance to the means of its two sides,

        min over i of  Σ_{j≤i} w_j (y_j − μ_before)² + Σ_{j>i} w_j (y_j − μ_after)².

    w_j is the part of log₂(1 + step) that step j stands for, so that densely recorded steps around
    a jump do not count more than others. For a jump the split is the jump; for a ramp, its middle.
    The levels are means over each side. The series need not be monotone, and no smoothing width is
    needed.

    The split is a change if the series `moves`, and its two levels differ by more residual standard
    deviations than those of white noise and of random walks do. A series that goes evenly from one
    end to the other, or wanders, has moved, but not at one time.

    Args:
        steps: ascending, ≥ 0.
        bound: `estimate_noise_bound` of these steps.
        resampled: the series on resampled rows; the bracket holds 95 % of their splits.

    Raises:
        ValueError: for fewer than `FEWEST` steps.

    Source: the least-squares split of Hinkley, Biometrika 57 (1970), 1, with weights.
    """
    _check(steps)
    weights = weigh_steps(steps)
    [at] = _find_splits(weights, values[None])
    [[before, after]], [clear] = _measure_levels(weights, values[None], np.array([at]))
    if not (moves(values) and clear > bound):
        return None
    splits = np.array([at]) if resampled is None else _find_splits(weights, resampled)
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
    """Whether the range of a series is at least `MOVES`."""
    return bool(np.ptp(values) >= MOVES)


def estimate_noise_bound(steps: Int[np.ndarray, " n"], rng: np.random.Generator) -> float:
    """Estimate how many standard deviations the levels of series without a change can differ by.

    All but `FALSE_ALARMS` of the best splits of two kinds of series stay below it: white noise,
    which few rows cause in a constant quantity, and random walks along log₂(1 + step), for a
    quantity that drifts at all times alike. Drifts that are smoother than a walk but bend are not
    covered; the levels of a straight drift are √12 apart, which is below.

    Raises:
        ValueError: for fewer than `FEWEST` steps.
    """
    _check(steps)
    weights, noise = weigh_steps(steps), rng.normal(size=(NOISES, len(steps)))
    strides = rng.normal(size=(NOISES, len(steps) - 1)) * np.sqrt(np.diff(np.log2(1.0 + steps)))
    walks = np.pad(strides.cumsum(-1), ((0, 0), (1, 0)))
    return max(
        float(
            np.quantile(
                _measure_levels(weights, null, _find_splits(weights, null))[1], 1 - FALSE_ALARMS
            )
        )
        for null in (noise, walks)
    )


def weigh_steps(steps: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Return how much of log₂(1 + step) each step stands for: half the way to its neighbours."""
    position = np.log2(1.0 + steps)
    edges = np.concatenate([position[:1], (position[1:] + position[:-1]) / 2, position[-1:]])
    return np.diff(edges)


def _find_splits(
    weights: Float[np.ndarray, " n"], series: Float[np.ndarray, "r n"]
) -> Int[np.ndarray, " r"]:
    """Return the last index before the best split of each series."""
    weight = weights.cumsum()
    total = (weights * series).cumsum(-1)
    left, right = weight[:-1], weight[-1] - weight[:-1]
    # The least distance within two groups is the most between their means.
    apart = total[:, :-1] / left - (total[:, -1:] - total[:, :-1]) / right
    return (left * right * apart**2).argmax(-1)


def _measure_levels(
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

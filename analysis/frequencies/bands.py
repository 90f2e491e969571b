"""What a mixer loses with a band of its rotary frequencies: the causal side of the atlas."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.base import Subject
from analysis.frequencies.spectra import find_rotary_pairs
from analysis.scoring import scored
from analysis.statistics.intervals import bootstrap
from lab.hooks import HookFn, HookPoint, NamesFilter
from lab.intervals import wilson
from lab.layers.mixer import RotaryPairs
from tasks.base import count_rows

BANDS = ("fast", "middle", "slow")
"""Thirds of the frequencies, from the shortest wavelength on."""
PLACEBOS = 19
"""Random sets of pairs a layer, each as many as a band has: what losing a third costs anyway.

A band that is no other than random ones is the worst of twenty in 5 % of cases.
"""
FEWEST_PLACEBOS = 5
"""As many are drawn anyway; the others only while a band of the layer may still matter."""
TOKENS = 100_000
"""Tokens of all forward passes together; each ablation gets as many rows as that allows."""
FEWEST_ROWS = 3


@dataclass(frozen=True)
class Band:
    """What happens to the accuracy when a mixer does without some pairs of channels.

    Attributes:
        layer: index of the block.
        sides: "Q/K" or "C/B".
        name: of the band.
        pairs: first and last pair of channels, of all heads.
        wavelengths: theirs, tokens.
        change: accuracy without them less accuracy with them, in [−1, 1].
        interval: 95 %, by resampling rows.
        placebo: the change without as many pairs drawn at random, a draw an entry.
    """

    layer: int
    sides: str
    name: str
    pairs: tuple[int, int]
    wavelengths: tuple[float, float]
    change: float
    interval: tuple[float, float]
    placebo: Float[np.ndarray, " rounds"]

    @property
    def matters(self) -> bool:
        """Whether the loss is one, and larger than that of every random set: by chance in 5 %."""
        return self.interval[1] < 0 and self.change < float(self.placebo.min())


@dataclass(frozen=True)
class Bands:
    """Every band of every rotated mixer, taken out one at a time.

    Attributes:
        bands: by layer, the shortest wavelengths first.
        accuracy: with all of them.
        interval: its 95 % Wilson interval, as if scored positions were independent.
        chance: the task's.
        rows: rows that were scored.
    """

    bands: tuple[Band, ...]
    accuracy: float
    interval: tuple[float, float]
    chance: float
    rows: int


@torch.no_grad()
def measure_bands(subject: Subject) -> Bands:
    """Take the fast, middle and slow third of each rotated mixer's pairs out, one at a time."""
    rotated = find_rotary_pairs(subject.model)
    passes = 1 + len(rotated) * (len(BANDS) + PLACEBOS)
    n_rows = count_rows(TOKENS, passes * subject.batch.inputs.shape[1], fewest=FEWEST_ROWS)
    batch = subject.batch[:n_rows]
    rng = np.random.default_rng(subject.seed)
    whole = scored(subject.model, batch)
    rows = whole.rows.cpu().numpy()
    right = whole.right.cpu().numpy()

    def loss(layer: int, pairs: Int[np.ndarray, " k"]) -> Float[np.ndarray, " q"]:
        with subject.model.hooks([remove_pairs(rotated[layer], layer, pairs)]):
            return scored(subject.model, batch).right.cpu().numpy() - 1.0 * right

    bands = []
    for layer, rotary in rotated.items():
        n_pairs = rotary.n_pairs
        thirds = np.array_split(np.arange(n_pairs), min(len(BANDS), n_pairs))
        changes = [loss(layer, pairs) for pairs in thirds]
        intervals = [_by_rows(change, rows, rng) for change in changes]
        lost = [c.mean() for c, (_, high) in zip(changes, intervals, strict=True) if high < 0]
        placebo: list[float] = []
        while len(placebo) < PLACEBOS:
            # A band that one random set is as bad as cannot matter, whatever others do.
            if len(placebo) >= FEWEST_PLACEBOS and not min(lost, default=0) < min(placebo):
                break
            draw = rng.choice(n_pairs, len(thirds[0]), replace=False)
            placebo.append(float(loss(layer, draw).mean()))
        waves = 2 * np.pi * rotary.base ** (np.arange(n_pairs) / n_pairs)
        for name, pairs, change, interval in zip(BANDS, thirds, changes, intervals, strict=False):
            bands.append(
                Band(
                    layer=layer,
                    sides=rotary.sides,
                    name=name,
                    pairs=(int(pairs[0]), int(pairs[-1])),
                    wavelengths=(float(waves[pairs[0]]), float(waves[pairs[-1]])),
                    change=float(change.mean()),
                    interval=interval,
                    placebo=np.array(placebo),
                )
            )
    accuracy = float(right.mean())
    return Bands(
        tuple(bands),
        accuracy,
        wilson(accuracy, len(right)),
        subject.task.chance,
        len(batch.inputs),
    )


def remove_pairs(
    rotary: RotaryPairs, layer: int, pairs: Int[np.ndarray, " k"]
) -> tuple[NamesFilter, HookFn]:
    """Return a hook, with its name, that takes pairs of channels out of a mixer's comparison.

    Zeros on the target's side are enough: every product has a factor there.
    """
    n_pairs = rotary.n_pairs
    kept = torch.ones(2 * n_pairs)
    first, second = (
        (pairs, pairs + n_pairs) if rotary.layout == "half" else (2 * pairs, 2 * pairs + 1)
    )
    kept[np.concatenate([first, second])] = 0.0

    def clear(tensor: Tensor, point: HookPoint) -> Tensor:
        return tensor * kept.to(tensor.device, tensor.dtype)

    return f"blocks.{layer}.mixer.{rotary.target_hook}", clear


def _by_rows(
    change: Float[np.ndarray, " q"], rows: Int[np.ndarray, " q"], rng: np.random.Generator
) -> tuple[float, float]:
    """Return the interval of the mean change; a row's positions stay together."""
    sums = np.bincount(rows, change), np.bincount(rows)
    return bootstrap(np.stack(sums, 1), rng, statistic=lambda z: z[:, 0].sum() / z[:, 1].sum())

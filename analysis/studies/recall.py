"""Results of the recall study by mixer, width and row length, next to the paper's figure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import polars as pl
from jaxtyping import Float

from analysis.base import Finding, Table
from analysis.figures import Axis, Curves, Line, curves
from analysis.statistics.comparisons import holm, sign_flip_p
from analysis.sweeps.settings import choose_rates, select_results
from lab.studies.published import COUNTERPARTS, PAPER_MIXERS, PUBLISHED, READING_ERROR

MASK, BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = PAPER_MIXERS[0], 0, 1, 2, 3, 4, 5
LOOKS = {
    "attention": BLUE,
    "value mask": VERMILLION,
    "soft mask": VERMILLION + 6,
    "straight-through mask": VERMILLION + 12,
    "literal mask": VERMILLION + 18,
    "oracle mask": ORANGE,
    "SSD, RoPE": GREEN,
    "SSD, convolution": GREEN + 6,
    "SSD, RoPE, short then long memory": GREEN + 12,
    "SSD, convolution, long memory": GREEN + 18,
    "inner function attention": PURPLE,
    "Cheems pair": SKY,
}
PAPER_LOOKS = {MASK: VERMILLION, "attention": BLUE, "SSD": GREEN, "Based": -1}
"""Numbers of the lines' looks: one colour per family, with other dashes and symbols within it."""
LEVEL = 0.05
"""Corrected p below which a mask counts as better or worse than attention."""
PANEL = 220
"""Height of a panel, px."""


@dataclass(frozen=True)
class Setting:
    """A mixer at one width and row length.

    Attributes:
        learning_rate: the one of those tried that was best on validation rows.
        accuracies: on test rows, one per seed.
        cut: how many of these runs reached the time limit unsolved.
    """

    mixer: str
    seq_len: int
    d_model: int
    learning_rate: str
    seeds: tuple[int, ...]
    accuracies: tuple[float, ...]
    cut: int

    @property
    def mean(self) -> float:
        """Mean accuracy over seeds."""
        return sum(self.accuracies) / len(self.accuracies)

    @property
    def published(self) -> float | None:
        """The paper's accuracy for the corresponding mixer; None if it has none."""
        counterpart = COUNTERPARTS.get(self.mixer, "")
        return PUBLISHED.get((counterpart, self.seq_len, self.d_model))


@dataclass(frozen=True)
class PaperComparison(Finding):
    """Accuracies of the settings, and those of the paper."""

    settings: tuple[Setting, ...]
    title = "Hard recall"
    reading = (
        "A panel for each row length. Lines join the means over seeds of a mixer, and whiskers "
        "reach from the lowest seed to the highest. Hollow markers are the paper's numbers, read "
        f"off its figure to ±{READING_ERROR}."
    )

    @property
    def gains(self) -> dict[str, list[tuple[float, Setting]]]:
        """How much more accurate each setting is than in the paper, ascending, by mixer."""
        found: dict[str, list[tuple[float, Setting]]] = {}
        for setting in self.settings:
            if setting.published is not None:
                gain = setting.mean - setting.published
                found.setdefault(setting.mixer, []).append((gain, setting))
        return {mixer: sorted(gains, key=lambda pair: pair[0]) for mixer, gains in found.items()}

    @property
    def says(self) -> str:
        """In how many settings the accuracy is above the paper's, and in how many below."""
        gains = [gain for found in self.gains.values() for gain, _ in found]
        above, below = _count_beyond(gains)
        return (
            f"Settings that are more accurate than in the paper: {above} of {len(gains)}; less "
            f"accurate: {below}; the others are within ±{READING_ERROR} of it."
        )

    def numbers(self) -> Table:
        """Return by mixer how its settings compare with the paper's, and where they differ most."""
        rows = []
        for mixer, found in self.gains.items():
            above, below = _count_beyond([gain for gain, _ in found])
            ends = [
                f"{gain:+.2f} at T {at.seq_len:,}, d {at.d_model}"
                for gain, at in (found[-1], found[0])
            ]
            rows.append((mixer, str(len(found)), str(above), str(below), *ends))
        heads = ("mixer", "settings", "above", "below", "best", "worst")
        return Table(heads, tuple(rows))

    def figure(self) -> go.Figure:
        """Draw accuracy by d_model: a panel for each row length, a line for each mixer."""
        accuracy, panels = Axis("test accuracy", "share"), []
        widths = sorted({width for _, _, width in PUBLISHED})
        for length in sorted({length for _, length, _ in PUBLISHED}):
            here = [s for s in self.settings if s.seq_len == length]
            lines = [_join([s for s in here if s.mixer == m], m) for m in LOOKS]
            for mixer, look in PAPER_LOOKS.items():
                shares = np.array([PUBLISHED[mixer, length, width] for width in widths])
                name, at = f"paper: {mixer}", np.array(widths, np.float64)
                lines.append(Line(name, at, shares, shape="points", look=look))
            title = f"{length:,} tokens, {length // 4} pairs"
            known = [line for line in lines if len(line.x)]
            panels.append(Curves(known, accuracy, title, height=PANEL))
        x = Axis("d_model", scale="log", ticks={width: str(width) for width in widths})
        return curves(panels, x, across=2).for_each_trace(
            lambda trace: trace.update(
                marker={"symbol": f"{trace.marker.symbol}-open", "size": 11}
            ),
            selector={"mode": "markers"},
        )


def _count_beyond(gains: Sequence[float]) -> tuple[int, int]:
    """Return how many gains, and how many losses, are beyond the error of reading the figure."""
    return sum(g > READING_ERROR for g in gains), sum(g < -READING_ERROR for g in gains)


def _join(points: Sequence[Setting], mixer: str) -> Line:
    points = sorted(points, key=lambda setting: setting.d_model)
    return Line(
        mixer,
        np.array([s.d_model for s in points], np.float64),
        np.array([s.mean for s in points]),
        np.array([(min(s.accuracies), max(s.accuracies)) for s in points]).reshape(-1, 2),
        look=LOOKS[mixer],
    )


@dataclass(frozen=True)
class MaskGain:
    """How much more accurate a dynamic mask is than attention without a mask.

    Attributes:
        gain: mean difference over pairs of runs of the same width and seed.
        p: of the sign-flip test, after Holm's correction over the masks.
        blind: whether no difference of so few pairs could be significant.
    """

    mixer: str
    gain: float
    pairs: int
    p: float
    blind: bool

    @property
    def verdict(self) -> str:
        """What the test says."""
        if self.blind:
            return "too few pairs"
        if self.p >= LEVEL:
            return "not significant"
        return "better" if self.gain > 0 else "worse"


@dataclass(frozen=True)
class MaskComparison(Finding):
    """Each dynamic mask against attention wherever both were run.

    Attributes:
        claimed: combinations of row length and width at which the paper's mask is better.
        places: combinations at which both were run here.
    """

    masks: tuple[MaskGain, ...]
    claimed: int
    places: int
    title = "Dynamic masks and attention"

    @property
    def says(self) -> str:
        """How many masks are better, and how many worse."""
        verdicts = [mask.verdict for mask in self.masks]
        return (
            "Masks that are significantly better than attention without a mask: "
            f"{verdicts.count('better')} of {len(verdicts)}; worse: {verdicts.count('worse')}; the "
            f"paper's mask is better at {self.claimed} of the {self.places} combinations of row "
            "length and width."
        )

    def numbers(self) -> Table:
        """Return what each mask gains."""
        rows = [
            (m.mixer, f"{m.gain:+.3f}", str(m.pairs), f"{m.p:.2g}", m.verdict) for m in self.masks
        ]
        return Table(("mask", "gain", "pairs of runs", "p (Holm)", "verdict"), tuple(rows))


def measure(settings: tuple[Setting, ...]) -> tuple[Finding, ...]:
    """Compare settings with the paper, and masks with attention where both were run."""
    if not settings:
        return ()
    masks = _compare_masks(settings)
    return (PaperComparison(settings), *([masks] if masks.masks else []))


def collect_settings(table: pl.DataFrame) -> tuple[Setting, ...]:
    """Return the settings that were run and evaluated, each at its best learning rate.

    Each row length has its own best rate (`analysis.sweeps.settings.choose_rates`).
    """
    keys = ["mixer", "d_model", "seq_len"]
    best = choose_rates(select_results(table), keys).filter(pl.col("accuracy").is_not_null())
    found = []
    for (mixer, width, length), chosen in best.group_by(keys, maintain_order=True):
        cut = chosen.filter((pl.col("status") == "out of time") & ~pl.col("solved"))
        found.append(
            Setting(
                str(mixer),
                int(str(length)),
                int(str(width)),
                str(chosen["learning_rate"][0]),
                tuple(chosen["seed"]),
                tuple(chosen["accuracy"]),
                cut.height,
            )
        )
    return tuple(found)


def count_runs(table: pl.DataFrame) -> tuple[int, int]:
    """Return how many runs have no accuracy at any row length, and how many there are."""
    runs = table.group_by("mixer", "d_model", "learning_rate", "seed").agg(
        pl.col("accuracy").is_null().all().alias("missing")
    )
    return int(runs["missing"].sum()), runs.height


def _compare_masks(settings: Sequence[Setting]) -> MaskComparison:
    bare = {(s.seq_len, s.d_model): s for s in settings if s.mixer == "attention"}
    masks = [name for name, paper in COUNTERPARTS.items() if paper == MASK]
    both = [s for s in settings if s.mixer in masks and (s.seq_len, s.d_model) in bare]
    places = {(s.seq_len, s.d_model) for s in both}
    claimed = sum(
        PUBLISHED[MASK, *place] > PUBLISHED["attention", *place] + 2 * READING_ERROR
        for place in places
    )
    gains = {name: _compute_gains([s for s in both if s.mixer == name], bare) for name in masks}
    gains = {name: gain for name, gain in gains.items() if len(gain)}
    ps = holm([sign_flip_p(gain) for gain in gains.values()])
    found = [
        MaskGain(
            mixer=name,
            gain=round(float(gain.mean()), 3) + 0.0,  # no minus before zero
            pairs=len(gain),
            p=p,
            blind=len(gains) * 2.0 ** (1 - len(gain)) >= LEVEL,
        )
        for (name, gain), p in zip(gains.items(), ps, strict=True)
    ]
    return MaskComparison(tuple(found), claimed, len(places))


def _compute_gains(
    masked: Sequence[Setting], bare: dict[tuple[int, int], Setting]
) -> Float[np.ndarray, " n"]:
    """Return how much more accurate each masked run is, as a mean over its row lengths.

    One run is evaluated at all its lengths, so they count as one observation.
    """
    gains: dict[tuple[int, int], list[float]] = {}
    for setting in masked:
        other = bare[setting.seq_len, setting.d_model]
        plain = dict(zip(other.seeds, other.accuracies, strict=True))
        for seed, accuracy in zip(setting.seeds, setting.accuracies, strict=True):
            if seed in plain:
                gains.setdefault((setting.d_model, seed), []).append(accuracy - plain[seed])
    return np.array([np.mean(gain) for gain in gains.values()], dtype=np.float64)

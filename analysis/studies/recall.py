"""Results of the recall study by mixer, width and row length, next to the paper's figure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import polars as pl
from jaxtyping import Float
from plotly.subplots import make_subplots

from analysis.plots.style import MUTED, new_figure
from analysis.statistics.holm import holm
from analysis.sweeps.lines import SHARES
from analysis.sweeps.settings import choose_rates, select_results
from lab.palette import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION
from lab.studies.published import COUNTERPARTS, PAPER_MIXERS, PUBLISHED, READING_ERROR

LOOKS = {
    "attention": (BLUE, "solid", "circle"),
    "value mask": (VERMILLION, "solid", "square"),
    "soft mask": (VERMILLION, "dash", "diamond"),
    "straight-through mask": (VERMILLION, "dot", "triangle-up"),
    "literal mask": (VERMILLION, "dashdot", "x"),
    "oracle mask": (ORANGE, "longdash", "star"),
    "SSD, RoPE": (GREEN, "solid", "triangle-down"),
    "SSD, convolution": (GREEN, "dash", "cross"),
    "SSD, RoPE, short then long memory": (GREEN, "dot", "triangle-up"),
    "SSD, convolution, long memory": (GREEN, "dashdot", "x"),
    "inner function attention": (PURPLE, "solid", "pentagon"),
    "Cheems pair": (SKY, "solid", "hexagon"),
}
"""Colour, dash and marker of each mixer: one colour per family, a different dash within it."""
PAPER_LOOKS = {
    "dynamic mask attention": (VERMILLION, "square-open"),
    "attention": (BLUE, "circle-open"),
    "SSD": (GREEN, "triangle-down-open"),
    "Based": (MUTED, "x-thin-open"),
}
LEVEL = 0.05
"""Corrected p below which a mask counts as better or worse than attention."""
MOST_FLIPPED = 16
"""Maximum number of pairs for which the sign-flip test tries every combination of signs."""
PANEL, LEGEND_ROW = 220, 22
"""Heights of a panel and of a row of the legend in pixels."""


@dataclass(frozen=True)
class Setting:
    """A mixer at one width and row length.

    Attributes:
        mixer: its name in the study.
        seq_len: tokens per row.
        d_model: width.
        learning_rate: the one of those tried that was best on validation rows.
        seeds: the seeds of its runs.
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


def measure(table: pl.DataFrame) -> list[Setting]:
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
    return found


def count_runs(table: pl.DataFrame) -> tuple[int, int]:
    """Return how many runs have no accuracy at any row length, and how many there are."""
    runs = table.group_by("mixer", "d_model", "learning_rate", "seed").agg(
        pl.col("accuracy").is_null().all().alias("missing")
    )
    return int(runs["missing"].sum()), runs.height


def summarize(settings: Sequence[Setting], missing: int, runs: int) -> list[str]:
    """Compare the settings that were run with the paper's figure, in sentences.

    Args:
        settings: as `measure` returns.
        missing: how many runs of the study have no accuracy.
        runs: how many it has.
    """
    if not settings:
        return [f"Nothing was run, so there is nothing to compare: {missing} runs are left."]
    sentences = [
        *_compare_with_paper(settings, "attention"),
        *_compare_with_paper(settings, "SSD, RoPE"),
        *_compare_with_paper(settings, "SSD, RoPE, short then long memory"),
        *_compare_masks(settings),
    ]
    cut = [setting for setting in settings if setting.cut]
    if cut:
        sentences.append(
            f"In {len(cut)} of {len(settings)} settings a run reached its time limit unsolved, so "
            "the accuracy is that of training cut short."
        )
    if missing:
        are = "is" if missing == 1 else "are"
        sentences.append(f"{missing} of the {runs} runs of the study {are} not there.")
    return sentences


def _compare_with_paper(settings: Sequence[Setting], mixer: str) -> list[str]:
    """Compare one mixer's accuracies with those read off the paper's figure."""
    pairs = [
        (setting, setting.published)
        for setting in settings
        if setting.mixer == mixer and setting.published is not None
    ]
    if not pairs:
        return []
    above = [pair for pair in pairs if pair[0].mean > pair[1] + READING_ERROR]
    below = [pair for pair in pairs if pair[0].mean < pair[1] - READING_ERROR]
    close = len(pairs) - len(above) - len(below)
    found = [
        f"{words} in {count}"
        for words, count in (
            ("more accurate", len(above)),
            ("less accurate", len(below)),
            (f"within ±{READING_ERROR}", close),
        )
        if count
    ]
    text = f"Against the paper, in {len(pairs)} setting{'s' * (len(pairs) != 1)} of {mixer}: "
    text += ", ".join(found)
    if above:
        setting, published = max(above, key=lambda pair: pair[0].mean - pair[1])
        text += f"; the largest gain is {_describe_difference(setting, published)}"
    if below:
        setting, published = min(below, key=lambda pair: pair[0].mean - pair[1])
        text += f"; the largest loss is {_describe_difference(setting, published)}"
    return [f"{text}."]


def _compare_masks(settings: Sequence[Setting]) -> list[str]:
    """Compare each dynamic mask with attention wherever both were run, as the paper does."""
    bare = {(s.seq_len, s.d_model): s for s in settings if s.mixer == "attention"}
    masks = [name for name, paper in COUNTERPARTS.items() if paper == PAPER_MIXERS[0]]
    both = [s for s in settings if s.mixer in masks and (s.seq_len, s.d_model) in bare]
    if not both:
        return []
    places = {(s.seq_len, s.d_model) for s in both}
    claimed = sum(
        PUBLISHED["dynamic mask attention", *place]
        > PUBLISHED["attention", *place] + 2 * READING_ERROR
        for place in places
    )
    sentences = [
        f"In the paper the dynamic mask is better than attention without a mask in {claimed} of "
        f"the {len(places)} combinations of row length and width at which both were run here."
    ]
    gains = {name: _compute_gains([s for s in both if s.mixer == name], bare) for name in masks}
    gains = {name: gain for name, gain in gains.items() if len(gain)}
    ps = [sign_flip_p(gain) for gain in gains.values()]
    for (name, gain), p in zip(gains.items(), holm(ps), strict=True):
        mean = round(float(gain.mean()), 3) + 0.0  # no minus before zero
        pairs = f"{len(gain)} pair{'s' * (len(gain) != 1)} of runs with the same width and seed"
        if len(gains) * 2.0 ** (1 - len(gain)) >= LEVEL:
            sentences.append(
                f"Here the {name} and attention without a mask differ by {mean:+.3f} over "
                f"{pairs}, too few for any difference to be significant."
            )
            continue
        relation = "does not differ significantly from"
        if p < LEVEL:
            relation = "is better than" if gain.mean() > 0 else "is worse than"
        sentences.append(
            f"Here the {name} {relation} attention without a mask: {mean:+.3f} over "
            f"{pairs} (sign-flip test, p = {p:.2g} after Holm's correction)."
        )
    return sentences


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


def sign_flip_p(gains: Float[np.ndarray, " n"]) -> float:
    """Return the two-sided p of the sign-flip test for a mean of paired differences.

    It tries every combination of signs, or draws 2^16 of them if there are more.
    """
    n = len(gains)
    if n <= MOST_FLIPPED:
        flips = 1 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
    else:
        flips = np.random.default_rng(0).choice([-1, 1], (2**MOST_FLIPPED, n))
    # The tolerance counts sums that differ only by rounding as equally extreme.
    return float(np.mean(np.abs(flips @ gains) >= abs(gains.sum()) - 1e-12))


def _describe_difference(setting: Setting, published: float) -> str:
    place = f"at T {setting.seq_len:,}, d_model {setting.d_model}"
    return f"{place}, {setting.mean:.2f} here and {published:.2f} there"


def draw(settings: Sequence[Setting]) -> go.Figure:
    """Draw accuracy by d_model: one panel per row length, one line per mixer.

    Hollow markers are the paper's numbers. Whiskers reach from the lowest seed to the highest.
    """
    lengths = sorted({length for _, length, _ in PUBLISHED})
    widths = sorted({width for _, _, width in PUBLISHED})
    mixers = [name for name in LOOKS if any(s.mixer == name for s in settings)]
    legend = LEGEND_ROW * -(-(len(mixers) + len(PAPER_MIXERS)) // 3)
    fig = make_subplots(
        rows=2,
        cols=2,
        shared_xaxes=True,
        shared_yaxes=True,
        subplot_titles=[f"{length:,} tokens, {length // 4} pairs" for length in lengths],
        horizontal_spacing=0.06,
        vertical_spacing=0.12,
        figure=new_figure(height=2 * PANEL + legend + 130),
    )
    for i, length in enumerate(lengths):
        place = {"row": i // 2 + 1, "col": i % 2 + 1, "showlegend": i == 0}
        for mixer in mixers:
            _add_line(
                fig,
                [s for s in settings if (s.mixer, s.seq_len) == (mixer, length)],
                mixer,
                place,
            )
        for mixer in PAPER_MIXERS:
            color, symbol = PAPER_LOOKS[mixer]
            fig.add_scatter(
                x=widths,
                y=[PUBLISHED[mixer, length, width] for width in widths],
                mode="markers",
                marker={"color": color, "symbol": symbol, "size": 11, "line": {"width": 1.6}},
                name=f"paper: {mixer}",
                legendgroup=f"paper: {mixer}",
                hovertemplate=f"paper, {mixer}, d_model %{{x}}: %{{y:.2f}}<extra></extra>",
                **place,
            )
    fig.update_annotations(font_size=11)
    fig.update_xaxes(type="log", tickvals=widths, ticktext=[str(width) for width in widths])
    fig.update_xaxes(title_text="d_model", row=2)
    fig.update_yaxes(**SHARES)
    fig.update_yaxes(title_text="test accuracy", col=1)
    return fig.update_layout(
        margin_b=legend + 60,
        legend={"y": -40 / (2 * PANEL), "yanchor": "top", "entrywidth": 210},
    )


def _add_line(fig: go.Figure, points: Sequence[Setting], mixer: str, place: dict[str, int]) -> None:
    """Add a mixer's line to a panel; without points it only gets an entry in the legend."""
    color, dash, symbol = LOOKS[mixer]
    points = sorted(points, key=lambda setting: setting.d_model)
    fig.add_scatter(
        x=[setting.d_model for setting in points] or [None],
        y=[setting.mean for setting in points] or [None],
        mode="lines+markers",
        line={"color": color, "dash": dash, "width": 2},
        marker={"symbol": symbol, "size": 7},
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [max(s.accuracies) - s.mean for s in points],
            "arrayminus": [s.mean - min(s.accuracies) for s in points],
            "thickness": 1,
            "width": 3,
        },
        name=mixer,
        legendgroup=mixer,
        hovertemplate=f"{mixer}, d_model %{{x}}: %{{y:.3f}}<extra></extra>",
        **place,
    )

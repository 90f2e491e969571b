"""What does each head look at, and how widely? Any mixer, attention and SSD alike, by its matrix.

    score        ⟨|M|, P⟩ / Σ|M|, P a 0/1 matrix of where a kind of head would look
    spread       H of |M| normalised, row by row, and e^H keys
    distance     Σ|M|(i − j) / Σ|M|

M is the matrix that the layer applies: signed for SSD, with D on its diagonal, and here |M|.
"""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int

from analysis.base import NotApplicableError, Subject, Words
from analysis.matrices import pictures as matrices
from analysis.matrices.head_scores import (
    GATED_TARGETS,
    PATTERNS,
    Looked,
    gated,
    looked,
    uniform_share,
)
from analysis.mixing import collect_mixers
from analysis.plots.heads import LINES, Panel, draw_dots
from analysis.words import percent
from lab.intervals import Z95
from lab.laws import MatrixMixer

TITLE = "What each head looks at"
ENTRIES = 2**27
"""Entries of matrices that are looked at in all, which says how many rows of the batch are."""
NAMED = 3
"""Most heads that a sentence names."""
PLACES = {
    "previous token": "the token before",
    "duplicate token": "earlier positions of the same token, where there are any",
    "induction": "what followed the same token earlier, where anything did",
    "first token": "the first token",
}
"""Where a head of each kind looks."""


@dataclass(frozen=True)
class Scores:
    """How much of each head's mass lies where a kind of head would look; p of `PATTERNS`.

    Attributes:
        layers: index of the block, a head an entry.
        heads: the head's index in its layer.
        mixers: the mixer's class.
        patterns: the kinds, in the order of the columns.
        scores: ⟨|M|, P⟩ / Σ|M| in [0, 1]: mean over rows of the batch.
        score_chance: the same of a uniform causal matrix.
        shares: ⟨|M|, P⟩ / Σ|M| over those rows of M in which P has a position: what a head of that
            kind brings to 1. NaN where no token of the batch has any.
        chance: the same of a uniform causal matrix.
        half_widths: of the shares' 95 % intervals, over rows of the batch.
        moved_shares: the shares when an entry weighs ‖M_ij v_j W_O‖; NaN for a mixer whose project
            is not linear.
        sampled: whether some layer's gate had the moved shares taken from `GATED_TARGETS` rows.
        rows: of the batch.
    """

    layers: Int[np.ndarray, " h"]
    heads: Int[np.ndarray, " h"]
    mixers: tuple[str, ...]
    patterns: tuple[str, ...]
    scores: Float[np.ndarray, "h p"]
    score_chance: Float[np.ndarray, " p"]
    shares: Float[np.ndarray, "h p"]
    chance: Float[np.ndarray, " p"]
    half_widths: Float[np.ndarray, "h p"]
    moved_shares: Float[np.ndarray, "h p"]
    sampled: bool
    rows: int


@dataclass(frozen=True)
class Reach:
    """How widely and how far each head looks.

    Attributes:
        layers, heads, mixers, rows: as in `Scores`.
        entropy: H of a row of |M| normalised, nats in [0, ln(i + 1)]; mean over its rows and the
            batch's.
        effective_keys: e^H in [1, i + 1]; likewise.
        distance: Σ|M|(i − j) / Σ|M|, tokens.
        uniform_entropy, uniform_keys, uniform_distance: of a uniform causal matrix.
    """

    layers: Int[np.ndarray, " h"]
    heads: Int[np.ndarray, " h"]
    mixers: tuple[str, ...]
    entropy: Float[np.ndarray, " h"]
    effective_keys: Float[np.ndarray, " h"]
    distance: Float[np.ndarray, " h"]
    uniform_entropy: float
    uniform_keys: float
    uniform_distance: float
    rows: int


@torch.no_grad()
def measure(subject: Subject) -> list[Scores | Reach]:
    """Return the heads' scores, and their reach.

    Raises:
        NotApplicableError: where no block's mixer offers a matrix.
        RunError: when a mixer that is not the lab's own raises.
    """
    found = collect_mixers(subject.model, subject.batch)
    open_ones = [mixer for mixer in found if isinstance(mixer.module, MatrixMixer)]
    if not open_ones:
        raise NotApplicableError("no block has a mixer that offers a matrix")
    seq_len = subject.batch.inputs.shape[1]
    n_heads = [len(mixer.matrix(0, slice(0, 1))) for mixer in open_ones]
    rows = min(len(subject.batch.inputs), max(1, ENTRIES // (sum(n_heads) * seq_len**2)))
    rng = np.random.default_rng(subject.seed)
    by_row: list[list[Looked]] = [
        [looked(mixer, row, subject.batch.inputs[row], rng) for row in range(rows)]
        for mixer in open_ones
    ]

    def gathered(name: str) -> np.ndarray:
        """Return a quantity of all heads, [row h …]."""
        layers = [torch.stack([getattr(row, name) for row in layer]) for layer in by_row]
        return torch.cat(layers, dim=1).double().cpu().numpy()

    layers = np.repeat([mixer.layer for mixer in open_ones], n_heads)
    heads = np.concatenate([np.arange(n) for n in n_heads])
    kinds = tuple(np.repeat([mixer.kind for mixer in open_ones], n_heads).tolist())
    uniform = [uniform_share(subject.batch.inputs[row]) for row in range(rows)]
    score_chance, chance = (torch.stack(part).cpu().numpy() for part in zip(*uniform, strict=True))
    on, mass = gathered("on_patterns"), gathered("mass")
    shares = _ratio(on, gathered("with_patterns"))
    moved = _ratio(gathered("moved_on_patterns"), gathered("moved_with_patterns"))
    # A row of the batch in which no token repeats says nothing of duplicates.
    shares, moved = (np.where(np.isnan(chance)[:, None], np.nan, z) for z in (shares, moved))
    place = np.arange(seq_len)
    return [
        Scores(
            layers=layers,
            heads=heads,
            mixers=kinds,
            patterns=PATTERNS,
            scores=_mean(_ratio(on, mass[..., None])),
            score_chance=_mean(score_chance),
            shares=_mean(shares),
            chance=_mean(chance),
            half_widths=_half_width(shares),
            moved_shares=_mean(moved),
            sampled=seq_len > GATED_TARGETS and any(gated(m.module) for m in open_ones),
            rows=rows,
        ),
        Reach(
            layers=layers,
            heads=heads,
            mixers=kinds,
            entropy=_mean(gathered("entropy")),
            effective_keys=_mean(gathered("effective_keys")),
            distance=_mean(gathered("distance")),
            uniform_entropy=float(np.log(place + 1).mean()),
            uniform_keys=float((place + 1).mean()),
            uniform_distance=float((place / 2).mean()),
            rows=rows,
        ),
    ]


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return part / whole, NaN where there is nothing."""
    return np.divide(part, whole, out=np.full_like(part, np.nan), where=whole > 0)


def _mean(values: Float[np.ndarray, "n ..."]) -> Float[np.ndarray, "..."]:
    """Return the mean over rows of the batch that have a value, NaN where none has."""
    seen = ~np.isnan(values)
    return _ratio(np.where(seen, values, 0.0).sum(0), seen.sum(0).astype(float))


def _half_width(values: Float[np.ndarray, "n ..."]) -> Float[np.ndarray, "..."]:
    """Return half the 95 % interval of that mean, NaN for fewer than two rows."""
    count = (~np.isnan(values)).sum(0).astype(float)
    square = _mean((values - _mean(values)) ** 2)
    return Z95 * np.sqrt(_ratio(square, np.maximum(count - 1, 0)))


def describe(result: Scores | Reach) -> Words:
    """Put the heads in words."""
    return _scores_in_words(result) if isinstance(result, Scores) else _reach_in_words(result)


def labels(scores: Scores) -> list[tuple[int, int]]:
    """Return which (head, pattern) surely hold more than chance, most of the way first.

    Surely: the low end of the interval lies past `matrices.SHOWS` of the way from chance to 1. A
    single row of the batch has no interval, and so no labels.
    """
    excess = (scores.shares - scores.chance) / (1 - scores.chance)
    # Written so that NaN, which the interval of a single row is, is no label.
    low = excess - scores.half_widths / (1 - scores.chance)
    order = np.argsort(-np.nan_to_num(excess, nan=-1.0), axis=None)
    pairs = zip(*np.unravel_index(order, excess.shape), strict=True)
    return [(int(h), int(p)) for h, p in pairs if low[h, p] >= matrices.SHOWS]


def _scores_in_words(scores: Scores) -> Words:
    shown = labels(scores)
    count = len(scores.layers)
    if shown:
        says = "; ".join(_label(scores, h, p) for h, p in shown[:NAMED])
        more = len({h for h, _ in shown} - {h for h, _ in shown[:NAMED]})
        says += f"; {more} further heads show a pattern." if more else "."
        says = says[0].upper() + says[1:]
    else:
        excess = np.nan_to_num(scores.shares - scores.chance, nan=-1.0)
        h, p = np.unravel_index(int(excess.argmax()), excess.shape)
        known = "No head surely shows one of these patterns"
        if scores.rows == 1:
            known = "Undecided, as one row of the batch has no interval"
        says = f"{known}: at most, {_label(scores, int(h), int(p))}."
    absent = [p for p, c in zip(scores.patterns, scores.chance, strict=True) if np.isnan(c)]
    reading = (
        "Of a head's mass |M|, the share on a kind of position, over those rows of its matrix that "
        "have such a position; the dashed line is what a uniform row would have there, whiskers "
        f"are 95 % intervals over {scores.rows} rows of the batch. Induction: positions after an "
        "earlier occurrence of the row's token. Diamonds weigh each entry by ‖M_ij v_j W_O‖, what "
        "it moves in the residual stream: far from the dot, the head looks where little is moved."
    )
    if scores.sampled:
        reading += f" Of gated layers those are of {GATED_TARGETS} random rows of the matrix."
    if count > LINES:
        reading += " Heads of a layer share a line."
    if absent:
        reading += f" No token repeats on these rows, so there is no {' and no '.join(absent)}."
    if np.isnan(scores.moved_shares).all(1).any():
        reading += " A mixer whose project is not linear in what it mixes has no diamonds."
    return Words(
        "Head scores, share of |M|",
        says,
        reading,
        f"Dot plot of {count} heads by {', '.join(scores.patterns)}. {says}",
    )


def _label(scores: Scores, head: int, pattern: int) -> str:
    """Name a head and what it looks at, beside chance and what it moves."""
    share, moved = scores.shares[head, pattern], scores.moved_shares[head, pattern]
    text = f"head {scores.layers[head]}.{scores.heads[head]} puts {percent(float(share))} of its "
    text += f"mass on {PLACES[scores.patterns[pattern]]}"
    weighed = "" if np.isnan(moved) else f"{percent(float(moved))} by what it moves, "
    return f"{text} ({weighed}uniform {percent(float(scores.chance[pattern]))})"


def _reach_in_words(reach: Reach) -> Words:
    names = [f"{layer}.{head}" for layer, head in zip(reach.layers, reach.heads, strict=True)]
    sharp, wide = int(reach.effective_keys.argmin()), int(reach.effective_keys.argmax())
    near, far = int(reach.distance.argmin()), int(reach.distance.argmax())
    if len(names) == 1:
        says = f"The head spreads over {reach.effective_keys[0]:.3g} keys (uniform rows"
        says += f" {reach.uniform_keys:.3g}), {reach.distance[0]:.3g} tokens back on average"
        says += f" (uniform {reach.uniform_distance:.3g})."
    else:
        says = f"Head {names[sharp]} is the sharpest with {reach.effective_keys[sharp]:.3g} "
        says += f"effective keys, {names[wide]} the widest with {reach.effective_keys[wide]:.3g} "
        says += f"(uniform rows {reach.uniform_keys:.3g}); mean distances go from "
        says += f"{reach.distance[near]:.3g} ({names[near]}) to {reach.distance[far]:.3g} tokens "
        says += f"({names[far]}; uniform {reach.uniform_distance:.3g})."
    reading = (
        "Effective keys are e^H, H the entropy of a row of |M| normalised, mean over rows: 1 for a "
        "row of one entry. Distance is Σ|M|(i − j) / Σ|M|. The dashed line is a uniform matrix."
    )
    if "SSD" in reach.mixers:
        reading += " An SSD matrix has D, the skip, on its diagonal, which sharpens it."
    if len(names) > LINES:
        reading += " Heads of a layer share a line."
    alt = f"Dot plot of effective keys and mean distance of {len(names)} heads. {says}"
    return Words("Spread and distance of |M|", says, reading, alt)


def draw(result: Scores | Reach) -> go.Figure:
    """Draw a line a head, a panel a quantity."""
    if isinstance(result, Reach):
        return _draw_reach(result)
    panels = [
        Panel(
            title=name.replace(" ", "\n"),
            values=(result.shares[:, p], result.moved_shares[:, p]),
            half_widths=result.half_widths[:, p],
            chance=float(result.chance[p]),
            ends=(-0.08, 1.08),
            ticks={0.0: "0", 0.5: "50", 1.0: "100"},
            shown=".1%",
        )
        for p, name in enumerate(result.patterns)
        if not np.isnan(result.chance[p])
    ]
    series = ("|M|", "moved")
    axis = "share of the head's mass, %"
    return draw_dots(result.layers, result.heads, panels, series, "uniform", axis)


def _draw_reach(reach: Reach) -> go.Figure:
    panels = [
        Panel(title, (values,), (-0.05 * most, 1.05 * most), chance=uniform)
        for title, values, uniform in (
            ("effective keys", reach.effective_keys, reach.uniform_keys),
            ("mean distance", reach.distance, reach.uniform_distance),
        )
        for most in (max(float(values.max()), uniform),)
    ]
    return draw_dots(reach.layers, reach.heads, panels, ("heads",), "uniform", "tokens")

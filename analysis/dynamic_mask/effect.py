"""How the masks change attention and answers."""

import html
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from analysis.base import Finding, Subject, Words
from analysis.dynamic_mask.beyond import Beyond, measure_beyond
from analysis.dynamic_mask.masks import MaskedHead, disable_masks, find_masked_layers
from analysis.dynamic_mask.positions import NAMED, pick_most
from analysis.plain import figure_only
from analysis.plots.lines import name_lines
from analysis.plots.style import BLUE, MUTED, VERMILLION, make_whiskers, new_figure
from analysis.scoring import scored
from analysis.statistics.estimates import (
    SURE,
    Estimate,
    estimate_accuracy,
    estimate_ratio,
    sum_by_row,
    westfall_young,
)
from analysis.words import capitalize, format_ends, name_layers, percent

NOTES = {
    "nothing": "does next to nothing",
    "noise": "moves attention to answers",
    "answers": "moves attention away from answers",
    "keys": "moves values away from their keys",
    "both": "moves attention to some answers, masks others",
    "neither": "moves attention among other keys",
    "undecided": "undecided",
}
"""Notes in the figure beside each head."""


@dataclass(frozen=True)
class MaskEffect(Finding):
    """How the masks change attention and answers.

    Attributes:
        accuracy: share of right answers; chance is the task's.
        layers: indices of the blocks with a mask.
        removal: by layer, the change of accuracy when its biases are set to zero; a window then
            keeps the latest keys.
        harm: by layer, p that the largest of these changes is as high if no removal is a gain.
        beyond: past the length of these rows.
        heads: as in `KeySelection`, where they are recorded.
    """

    accuracy: Estimate
    layers: tuple[int, ...]
    removal: tuple[Estimate, ...]
    harm: tuple[float, ...]
    beyond: Beyond
    heads: tuple[MaskedHead, ...] = figure_only()

    @property
    def harmful(self) -> list[int]:
        """The layers without whose masks more answers are right."""
        return [layer for layer, p in zip(self.layers, self.harm, strict=True) if p < SURE]

    def describe(self) -> Words:
        """Describe what the masks that move most attention remove, and what that costs."""
        heads = [_describe_head(head) for head in pick_most(self.heads, lambda head: head.moved)]
        removal = zip(self.layers, self.removal, strict=True)
        changes = [
            f"{100 * change.value:+.1f} points "
            f"{format_ends(change.low, change.high, lambda end: f'{100 * end:+.1f}')} "
            f"in layer {layer}"
            for layer, change in sorted(removal, key=lambda pair: -abs(pair[1].value))[:NAMED]
        ]
        says = (
            f"{capitalize('; '.join(heads))}. {percent(self.accuracy.value)} of the answers are "
            f"right (chance {percent(self.accuracy.chance)}); setting the biases to zero changes "
            f"that by {', '.join(changes)}."
        )
        if self.harmful:
            says += f" More answers are right without the masks of {name_layers(self.harmful)}: "
            says += "they do harm."
        reading = (
            "A⁰ is the attention of the same queries and keys without the mask's bias and window. "
            "The lost mass is what A⁰ puts on masked keys; a random mask loses as much as the "
            "share of keys that it masks. A mask moves attention to answers if their values get "
            "more with it than without it, however little; the numbers say how much. It moves "
            "stored values away from their keys if these attend more than evenly to their own key "
            "without the mask, and lose some of that. A layer's masks do harm if more answers are "
            "right without them, "
            f"p < {SURE} corrected for the number of layers. {self.beyond.summarize()}"
        )
        return Words(
            title="What masking does to the attention on the answer",
            says=says,
            reading=reading,
            alt=f"Pairs of dots, a line per head. {says}",
        )

    def draw(self) -> go.Figure | None:
        """Draw attention on the answer's value with and without mask, a line per head.

        None for a task without stored pairs.
        """
        heads = [(head, head.pairs.answer) for head in self.heads if head.pairs is not None]
        if not heads:
            return None
        lines = list(range(len(heads)))
        fig = new_figure(height=150 + 34 * len(lines))
        for line, (head, answer) in enumerate(heads):
            ends = sorted((answer.chance, answer.value))
            fig.add_scatter(
                x=[answer.chance, answer.value],
                y=[line, line],
                mode="lines",
                line={"color": MUTED, "width": 2},
                showlegend=False,
                hoverinfo="skip",
            )
            note = NOTES[head.removed] + (", does harm" if head.layer in self.harmful else "")
            right = ends[1] < 0.5
            fig.add_annotation(
                text=html.escape(note),
                x=ends[1] if right else ends[0],
                y=line,
                xanchor="left" if right else "right",
                xshift=10 if right else -10,
            )
        masked = np.array([answer.value for _, answer in heads])
        intervals = np.array([(answer.low, answer.high) for _, answer in heads])
        whiskers = make_whiskers(masked, intervals, 1.2, 3)
        for name, values, symbol, color, error_x in (
            (
                "without the mask, A⁰",
                np.array([answer.chance for _, answer in heads]),
                "circle-open",
                VERMILLION,
                None,
            ),
            ("with it, A", masked, "circle", BLUE, whiskers),
        ):
            fig.add_scatter(
                x=values,
                y=lines,
                mode="markers",
                marker={"symbol": symbol, "color": color, "size": 9, "line": {"width": 2}},
                error_x=error_x,
                name=name,
                cliponaxis=False,
                hovertemplate=f"{name}: %{{x:.2%}}<extra></extra>",
            )
        fig.update_xaxes(range=[-0.03, 1.03], tickformat=".0%")
        fig.update_xaxes(title_text="attention of scored queries on their answer's value")
        name_lines(fig, [head.name for head, _ in heads])
        return fig.update_layout(margin_t=80)


def measure_effect(
    subject: Subject, heads: tuple[MaskedHead, ...], rng: np.random.Generator
) -> MaskEffect:
    """Measure the answers with the masks, without those of each layer, and on longer rows."""
    layers = tuple(find_masked_layers(subject.model))
    masked = scored(subject.model, subject.batch)
    removal, gains = [], []
    for layer in layers:
        with disable_masks(subject.model, [layer]):
            bare = scored(subject.model, subject.batch)
        change = bare.right.double() - masked.right.double()
        sums, counts = sum_by_row(masked, change)
        removal.append(estimate_ratio(sums, counts, 0.0, rng))
        gains.append(sums.cpu().numpy())
    right = estimate_accuracy(masked, subject.task.chance, rng)
    harm = tuple(westfall_young(-np.stack(gains, 1), rng).tolist())
    beyond = measure_beyond(subject, rng)
    return MaskEffect(right, layers, tuple(removal), harm, beyond, heads)


def _describe_head(head: MaskedHead) -> str:
    """Describe what the mask of a head removes, and the attention that shows it."""
    if head.removed == "nothing":
        return f"{head.name} moves next to none of the attention ({percent(head.moved)})"
    if head.pairs is None:
        return f"{head.name} moves {percent(head.moved)} of the attention"
    pairs = head.pairs
    opening = {
        "noise": f"{head.name} moves attention to answers:",
        "answers": f"{head.name} moves attention away from answers:",
        "keys": f"{head.name} moves stored values away from their keys: they put "
        f"{percent(pairs.key.value)} of their attention there, "
        f"{percent(pairs.key.chance)} without the mask "
        f"({percent(pairs.key_uniform)} if even), and",
        "both": f"{head.name} moves attention to some answers and masks others:",
        "neither": f"{head.name} moves attention among other keys:",
        "undecided": f"in {head.name} it is undecided what the mask removes:",
    }[head.removed]
    text = (
        f"{opening} answers get {percent(pairs.answer.value)} of the attention, "
        f"{percent(pairs.answer.chance)} without the mask"
    )
    if pairs.hidden.value > 0:
        text += f"; {percent(pairs.hidden.value)} of the answers are masked"
    if head.lost.value > 0:
        text += (
            f" (mass lost: {percent(head.lost.value)}, chance {percent(head.lost.chance)}; of it "
            f"on answers: {percent(pairs.lost_answer.value)}, chance "
            f"{percent(pairs.lost_answer.chance)})"
        )
    return text

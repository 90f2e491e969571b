"""Which expert holds which answer: an answer that is lost without this expert alone."""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Int
from plotly.subplots import make_subplots

from analysis.base import Finding, Words
from analysis.experts.holders import (
    HALVED,
    LEAD,
    Holding,
    draw_answers,
    find_holders,
)
from analysis.experts.sites import find_retrieval_layers
from analysis.plain import figure_only
from analysis.plots import style
from analysis.words import format_nats, percent
from lab.intervals import wilson
from lab.layers.retrieval import RetrievedExperts
from lab.models import LanguageModel
from tasks.base import Batch

TOP = 8
"""Experts that are named."""
NAMED = 4
"""Answers of an expert that are named."""
FLOOR = 1e-4
"""Lower end of the axes, nats; smaller effects are drawn there."""
FULL = 4
"""The axis of experts has a long name if it has room for more experts than this."""
FEW = 0.01
"""Single experts must hold more than this share of the answers for certain, as some are luck."""


@dataclass(frozen=True)
class Holder:
    """An expert that holds answers.

    Attributes:
        place: its row and column key.
        answers: scored positions that it holds.
        effect: median rise of their losses without the expert, nats.
        targets: the tokens of the answers, most frequent first, and how often each occurs.
    """

    place: tuple[int, int]
    answers: int
    effect: float
    targets: tuple[tuple[int, int], ...]

    def format_targets(self) -> str:
        """Return the tokens of the answers as text."""
        named = ", ".join(f"{token} × {times}" for token, times in self.targets)
        complete = self.answers == sum(times for _, times in self.targets)
        return named if complete else f"{named}, …"


@dataclass(frozen=True)
class HeldAnswers(Finding):
    """Which expert of a layer holds which answer.

    Attributes:
        layer: index of the block.
        kind: the layer's class.
        rows: of the batch on which this was measured.
        asked: how many scored positions were measured, drawn at random.
        held: how many of these one expert holds (`Holding.held`).
        halved: how many are half as likely, or less, without the expert that matters most.
        rivals: how many are half as likely, or less, without the runner-up.
        lost: how many are half as likely, or less, without all of the layer's experts.
        effect: median and 90 % quantile of the rise of the loss without one expert, nats.
        holders: how many experts hold any.
        kind_of: what makes two answers the same: a fact, if the task links facts, else a token.
        same: share of pairs of held answers, same by `kind_of`, that have the same expert; NaN
            without such pairs.
        any_two: that share among all pairs of held answers, for comparison.
        top: the experts that hold most.
        effects: rise of each answer's loss without the expert that matters most, nats.
        seconds: the same without the runner-up.
        by_one: whether one expert holds the answer.
    """

    layer: int
    kind: str
    rows: int
    asked: int
    held: int
    halved: int
    rivals: int
    lost: int
    effect: tuple[float, float]
    holders: int
    kind_of: str
    same: float
    any_two: float
    copies: int
    top: tuple[Holder, ...]
    effects: Float[np.ndarray, " q"] = figure_only()
    seconds: Float[np.ndarray, " q"] = figure_only()
    by_one: Bool[np.ndarray, " q"] = figure_only()

    def describe(self) -> Words:
        """Say how many answers single experts hold, and which experts hold most."""
        title = f"Layer {self.layer} · {self.kind} · which expert holds which answer"
        share, count = self.held / self.asked, f"{self.held:,} of {self.asked:,} answers"
        whole = f"without all experts {self.lost:,} are half as likely or less"
        if wilson(share, self.asked)[0] <= FEW:
            median, high = map(format_nats, self.effect)
            more, needed = self.halved - self.held, ""
            if more:
                needed = f"without it {more:,} more {'is' if more == 1 else 'are'} half as likely "
                needed += "or less, but wrong anyway or in need of other experts as well; "
            says = (
                f"Hardly any answer is held by one expert alone: {count} in layer {self.layer}. "
                "Without the expert that matters most to it, an answer's loss rises by "
                f"{median} nats in the median and {high} at the 90 % quantile; {needed}{whole}."
            )
        else:
            first = self.top[0]
            says = (
                f"{count} ({percent(share)}) in layer {self.layer} are each held by one expert: "
                "without it alone they are half as likely or less. Without the runner-up "
                f"{self.rivals:,} of all answers are; {whole}. "
            )
            says += (
                f"Expert {first.place} alone holds any"
                if self.holders == 1
                else f"{self.holders:,} experts hold any, most of all {first.place} with "
                f"{first.answers:,}"
            )
            if not np.isnan(self.same):
                says += (
                    f"; two held answers with the same {self.kind_of} have the same expert in "
                    f"{percent(self.same)} of cases (any two: {percent(self.any_two)})"
                )
            says += "."
        if self.copies:
            says += (
                f" {self.copies:,} experts have the same weights as another: where a token chooses "
                "both, one can stand in for the other."
            )
        reading = (
            f"Each dot is one of {self.asked:,} answers drawn from {self.rows} rows. An expert "
            "holds an answer if it is right, and the loss rises without the expert by at least "
            f"log 2, {LEAD} times as much as without any other expert that was tried, and half as "
            "much as without all of the layer's experts. Experts are tried if their effect is "
            "large to first order; every effect is measured by a rerun. Below: the experts that "
            "hold most, with the tokens of their answers and how often each occurs."
        )
        held = "; ".join(f"{one.place}: {one.format_targets()}" for one in self.top)
        alt = f"Scatter of the effect of one expert and of the runner-up. {says}"
        return Words(title, says, reading, f"{alt} Answers held: {held}." if held else alt)

    def draw(self) -> go.Figure:
        """Draw the two largest effects on each answer, and the experts that hold most answers."""
        bars = [*reversed(self.top)]
        above, below = 300, 24 * len(bars) + 8
        margins = {"t": 84, "b": 48}
        if not bars:
            fig = style.new_figure(above + margins["t"] + margins["b"])
            panel = {}
        else:
            gap = 72
            fig = make_subplots(
                rows=2,
                cols=1,
                row_heights=[above, below],
                vertical_spacing=gap / (above + gap + below),
                figure=style.new_figure(above + gap + below + margins["t"] + margins["b"]),
            )
            panel = {"row": 1, "col": 1}
        top = 1.5 * max(float(self.effects.max()), 2 * HALVED)
        # Below the dashed line the runner-up is too near; below the dotted one the effect is small.
        for line, name, dash in (
            (([FLOOR, top / LEAD], [LEAD * FLOOR, top]), f"{LEAD} × the runner-up", "dash"),
            (([FLOOR, top], [HALVED, HALVED]), "half as likely", "dot"),
        ):
            fig.add_scatter(
                x=line[0],
                y=line[1],
                mode="lines",
                line={"color": style.MUTED, "width": 1.3, "dash": dash},
                name=name,
                hoverinfo="skip",
                **panel,
            )
        for by_one, name, look in (
            (
                False,
                "no one expert",
                {"color": style.VERMILLION, "symbol": "x-thin-open", "size": 5},
            ),
            (True, "held by one", {"color": style.BLUE, "symbol": "circle", "size": 6}),
        ):
            kept = self.by_one == by_one
            if kept.any():
                fig.add_scatter(
                    x=np.maximum(self.seconds[kept], FLOOR).astype(np.float32),
                    y=np.maximum(self.effects[kept], FLOOR).astype(np.float32),
                    mode="markers",
                    marker=look,
                    opacity=0.7,
                    name=name,
                    hovertemplate="%{y:.3g} nats, runner-up %{x:.3g}<extra></extra>",
                    **panel,
                )
        axis = {"type": "log", "tickformat": "~g", "dtick": 1}
        ends = [np.log10(FLOOR) - 0.1, np.log10(top)]
        fig.update_xaxes(**axis, range=ends, title_text="loss without the runner-up, rise in nats")
        fig.update_yaxes(**axis, range=ends, title_text="without the expert that matters most")
        if bars:
            fig.add_bar(
                x=[one.answers for one in bars],
                y=[str(one.place) for one in bars],
                orientation="h",
                marker={"color": style.BLUE},
                showlegend=False,
                hovertext=[f"{one.answers} answers, median {one.effect:.2f} nats" for one in bars],
                hoverinfo="text",
                row=2,
                col=1,
            )
            most = bars[-1].answers
            for one in bars:
                fig.add_annotation(
                    text=f"{one.answers}: {one.format_targets()}",
                    x=one.answers,
                    y=str(one.place),
                    xshift=4,
                    xanchor="left",
                    row=2,
                    col=1,
                )
            fig.update_xaxes(
                type="linear",
                range=[0, 2.2 * most],
                dtick=max(1, round(most / 2)),
                tickformat=",d",
                title_text="answers held: their tokens",
                row=2,
                col=1,
            )
            fig.update_yaxes(
                type="category",
                range=[-0.6, len(bars) - 0.4],
                dtick=None,
                title_text="expert (row, column)" if len(bars) > FULL else "expert",
                showgrid=False,
                row=2,
                col=1,
            )
        return fig.update_layout(margin={**margins, "l": 74})


def measure_held_answers(
    model: LanguageModel,
    batch: Batch,
    layer: int,
    rng: np.random.Generator,
    most: int = 1024,
) -> HeldAnswers:
    """Measure which expert of a layer holds which of a batch's answers.

    Args:
        model: a language model.
        batch: rows, of any task.
        layer: index of a block with product-key experts.
        rng: draws the answers.
        most: how many answers are measured at most.
    """
    some = draw_answers(batch, most, rng)
    found = find_holders(model, some, layer)
    module = find_retrieval_layers(model)[layer]
    targets = some.targets.cpu().numpy()[found.rows, found.positions]
    facts = _find_facts(some, found)
    held = found.held
    experts, counts = np.unique(found.experts[held], return_counts=True)
    first = np.argsort(-counts, kind="stable")[:TOP]
    return HeldAnswers(
        layer=layer,
        kind=type(module).__name__,
        rows=len(np.unique(found.rows)),
        asked=len(held),
        held=int(held.sum()),
        halved=int((found.effects >= HALVED).sum()),
        rivals=int((found.seconds >= HALVED).sum()),
        lost=int((found.worth >= HALVED).sum()),
        effect=(float(np.median(found.effects)), float(np.quantile(found.effects, 0.9))),
        holders=len(experts),
        kind_of="token" if facts is None else "fact",
        same=_share_together(found.experts[held], (targets if facts is None else facts)[held]),
        any_two=_share_together(found.experts[held], np.zeros_like(targets[held])),
        copies=_count_copies(module),
        top=tuple(
            _describe_holder(int(expert), module.shape[1], found, targets)
            for expert in experts[first]
        ),
        effects=found.effects,
        seconds=found.seconds,
        by_one=held,
    )


def _count_copies(module: RetrievedExperts) -> int:
    """Return how many experts have the same weights as another one."""
    tables = torch.cat([module.down, module.up], dim=1).detach()
    _, counts = tables.unique(dim=0, return_counts=True)
    return int(counts[counts > 1].sum())


def _find_facts(batch: Batch, found: Holding) -> Int[np.ndarray, " q"] | None:
    """Return the fact that each scored position asks for; None if the task links no facts."""
    if "fact" not in batch.links:
        return None
    query, fact = batch.links["query_pos"], batch.links["fact"]
    # Padding, −1, goes to an additional column.
    at = torch.full((len(query), batch.inputs.shape[1] + 1), -1, device=query.device)
    return at.scatter_(1, query % at.shape[1], fact).cpu().numpy()[found.rows, found.positions]


def _describe_holder(
    expert: int, columns: int, found: Holding, targets: Int[np.ndarray, " q"]
) -> Holder:
    own = found.held & (found.experts == expert)
    tokens, times = np.unique(targets[own], return_counts=True)
    first = np.argsort(-times, kind="stable")[:NAMED]
    return Holder(
        place=(expert // columns, expert % columns),
        answers=int(own.sum()),
        effect=float(np.median(found.effects[own])),
        targets=tuple((int(tokens[i]), int(times[i])) for i in first),
    )


def _share_together(experts: Int[np.ndarray, " n"], kinds: Int[np.ndarray, " n"]) -> float:
    """Return the share of pairs of the same kind with the same expert; NaN without pairs."""

    def count_pairs(*labels: Int[np.ndarray, " n"]) -> int:
        times = np.unique(np.stack(labels), axis=1, return_counts=True)[1]
        return int((times * (times - 1) // 2).sum())

    possible = count_pairs(kinds)
    return count_pairs(kinds, experts) / possible if possible else float("nan")

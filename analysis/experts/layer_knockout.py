"""A layer without some of its experts, and without any."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch

from analysis.base import Finding, Words
from analysis.experts.effects import AnswerChange, add_changes, format_change, measure_changes
from analysis.experts.sites import Site
from analysis.plots import style
from analysis.words import capitalize, percent

NEAR = 5
"""A twin is drawn among this many experts whose number of choices is nearest."""
FEW = 10
"""Rows below which intervals are not to be trusted."""
FAR = 4
"""The axis includes the effect of all experts up to this many times the effects of single ones."""
LOOKS = {
    "most loaded": {"color": style.BLUE, "symbol": "circle", "size": 9},
    "twins, chosen as often": {
        "color": style.VERMILLION,
        "symbol": "diamond-open",
        "size": 9,
        "line": {"width": 2},
    },
}


@dataclass(frozen=True)
class Deletion:
    """A run of the model without one expert.

    Attributes:
        place: its row and column key.
        twin: whether the expert is a placebo, chosen about as often as one of the most loaded.
        choices: its share of the layer's choices.
        load: its share of Σ |w|.
        change: of the answers.
    """

    place: tuple[int, int]
    twin: bool
    choices: float
    load: float
    change: AnswerChange


@dataclass(frozen=True)
class RoleDeletion:
    """Deletions at the tokens of one role alone.

    Attributes:
        role: its name.
        tokens: how many there are.
        everything: the change if all of the layer's experts are deleted there.
        one: the change if its most loaded expert is deleted there.
    """

    role: str
    tokens: int
    everything: AnswerChange
    one: AnswerChange


@dataclass(frozen=True)
class LayerKnockout(Finding):
    """A layer without some of its experts, and without any.

    Attributes:
        layer: index of the block.
        kind: the layer's class.
        n_experts: rows of its tables.
        rows: of the batch on which this was measured.
        scored: positions behind each mean.
        loss: with all experts, nats.
        accuracy: with all experts.
        deletions: of single experts, the most harmful first.
        everything: the change if all experts are deleted.
        by_answer: the same over the scored positions of each role, by name of the role.
        by_role: deletions at the tokens of one role.
        unused: how many experts no token chooses.
        unused_change: largest change of the layer's output when these are set to zero; 0 unless
            something reads them.
    """

    layer: int
    kind: str
    n_experts: int
    rows: int
    scored: int
    loss: float
    accuracy: float
    deletions: tuple[Deletion, ...]
    everything: AnswerChange
    by_answer: dict[str, AnswerChange]
    by_role: tuple[RoleDeletion, ...]
    unused: int
    unused_change: float

    def describe(self) -> Words:
        """Say whether the layer's experts matter, and whether a single one does."""
        title = f"Layer {self.layer} · {self.kind} · loss without one expert"
        low, high = self.everything.loss_interval
        if self.everything.negligible:
            opening = "The layer's experts hardly matter to the answers"
        elif low > 0:
            opening = "The layer's experts lower the loss"
        elif high < 0:
            opening = "The layer's experts raise the loss"
        else:
            opening = "No effect of the layer's experts shows"
        says = (
            f"{opening}: deleting all {self.n_experts:,} {self.everything.describe()}. "
            f"{self._describe_worst()}."
        )
        unused = (
            f"no token uses {self.unused:,} of the experts: zeroing these changes the layer's "
            f"output by {self.unused_change:.2g} at most, as it must"
            if self.unused
            else "every expert is used"
        )
        reading = (
            "Every dot is the model run again with w_e = 0 for one expert e, on "
            f"{self.rows} rows with {self.scored:,} answers. With all experts the loss is "
            f"{self.loss:.3g} nats and the accuracy {percent(self.accuracy)}. Whiskers are 95 % "
            "bootstrap intervals over rows. Most loaded is by Σ |w_e|. Twins are placebos: used "
            "experts drawn so that they are chosen about as often; the band is their range. "
            f"{capitalize(unused)}."
        )
        if self.rows < FEW:
            reading += f" With {self.rows} rows, the intervals are narrower than they should be."
        if len(self.by_answer) > 1:
            others = "; ".join(
                f"over answers at {html.escape(role)} tokens it {change.describe()}"
                for role, change in self.by_answer.items()
            )
            reading += f" Deleting all experts: {others}."
        alt = f"Dots of the change of loss without each expert, the most harmful on top. {says}"
        return Words(title, says, reading, alt)

    def _describe_worst(self) -> str:
        """Say whether one of the most loaded experts stands out from its twins."""
        loaded, twins = ([d for d in self.deletions if d.twin is twin] for twin in (False, True))
        worst = loaded[0].change
        effect = f"deleting expert {loaded[0].place} alone {worst.describe_loss()}"
        if not twins:
            return (
                f"The most harmful deletion among the {len(loaded)} experts in use: {effect}; no "
                "twin is left"
            )
        highest = twins[0].change.loss
        # Of as many experts and twins with like effects, the worst is an expert half of the time.
        stands_out = worst.harmful and worst.loss_interval[0] > highest
        which = "One expert" if stands_out else "No single expert"
        twin = "its twin by" if len(twins) == 1 else f"one of its {len(twins)} twins by at most"
        return (
            f"{which} of the {len(loaded)} most loaded stands out: {effect}, deleting {twin} "
            f"{format_change(highest)}"
        )

    def draw(self) -> go.Figure:
        """Draw the change of loss without each expert, the most harmful on top."""
        names = [str(deletion.place) for deletion in self.deletions]
        everything = f"all {self.n_experts:,}"
        fig = style.new_figure(84 + 22 * (len(names) + 1) + 52)
        twins = [d.change.loss for d in self.deletions if d.twin]
        if twins:
            fig.add_vrect(
                min(twins),
                max(twins),
                fillcolor=style.MUTED,
                opacity=0.3,
                line_width=0,
                layer="below",
            )
        fig.add_vline(0, line={"color": style.MUTED, "width": 1}, layer="below")
        for (name, look), twin in zip(LOOKS.items(), (False, True), strict=True):
            chosen = [i for i, deletion in enumerate(self.deletions) if deletion.twin is twin]
            deleted = [self.deletions[i] for i in chosen]
            notes = [f"{percent(d.choices)} of choices, {percent(d.load)} of Σ|w|" for d in deleted]
            add_changes(
                fig,
                [names[i] for i in chosen],
                [d.change for d in deleted],
                {"name": name, "marker": look, "customdata": notes},
            )
        ends = [end for d in self.deletions for end in (*d.change.loss_interval, d.change.loss)]
        reach = 1.08 * float(np.nanmax(np.abs(ends))) or 1.0
        low, high = self.everything.loss_interval
        if np.nanmax(np.abs([low, high, self.everything.loss])) <= FAR * reach:
            whole = {"color": style.GREEN, "symbol": "square", "size": 9}
            look = {"name": "all experts", "marker": whole, "customdata": ["the whole layer"]}
            add_changes(fig, [everything], [self.everything], look)
        else:
            right = self.everything.loss > 0
            fig.update_xaxes(range=[-reach, reach])
            fig.add_annotation(
                text=f"{format_change(self.everything.loss)} →"
                if right
                else f"← {format_change(self.everything.loss)}",
                x=1 if right else 0,
                xref="x domain",
                xanchor="right" if right else "left",
                y=everything,
            )
        fig.update_yaxes(
            categoryorder="array",
            categoryarray=[*names[::-1], everything],
            range=[-0.6, len(names) + 0.6],
            title_text="expert (row, column)",
            showgrid=False,
            automargin="left",
        )
        fig.update_xaxes(title_text="change of loss when deleted, nats", tickformat="~g")
        return fig.update_layout(margin_t=84)


def knock_out_layer(
    site: Site, role_names: Sequence[str], rng: np.random.Generator, n_experts: int = 8
) -> LayerKnockout:
    """Measure a layer without its most loaded experts, their twins, and all of its experts.

    Args:
        site: the layer and its activations.
        role_names: the task's.
        rng: draws twins, and resamples rows.
        n_experts: how many of the most loaded and of the twins; fewer if fewer are used.
    """
    loaded = [int(e) for e in np.argsort(-site.loads, kind="stable") if site.counts[e]]
    loaded = loaded[:n_experts]
    choices, columns = site.counts / site.counts.sum(), site.module.shape[1]
    load = site.loads / max(site.loads.sum(), np.finfo(np.float64).tiny)
    deletions = [
        Deletion(
            place=(expert // columns, expert % columns),
            twin=twin,
            choices=float(choices[expert]),
            load=float(load[expert]),
            change=measure_changes(site, site.select(expert), rng)[""],
        )
        for twin, experts in ((False, loaded), (True, _draw_twins(site, loaded, rng)))
        for expert in experts
    ]
    everywhere = torch.ones_like(site.indices, dtype=torch.bool)
    by_answer = measure_changes(site, everywhere, rng, role_names)
    by_role = []
    for i, role in enumerate(role_names):
        where = site.batch.roles == i
        if where.any():
            at = where[..., None, None]
            by_role.append(
                RoleDeletion(
                    role=role,
                    tokens=int(where.sum()),
                    everything=measure_changes(site, everywhere & at, rng)[""],
                    one=measure_changes(site, site.select(loaded[0], role=i), rng)[""],
                )
            )
    return LayerKnockout(
        layer=site.layer,
        kind=type(site.module).__name__,
        n_experts=site.n_experts,
        rows=len(site.indices),
        scored=len(site.whole.losses),
        loss=site.whole.losses.mean().item(),
        accuracy=site.clean.accuracy,
        deletions=tuple(sorted(deletions, key=lambda deletion: -deletion.change.loss)),
        everything=by_answer.pop(""),
        by_answer=by_answer,
        by_role=tuple(by_role),
        unused=int((site.counts == 0).sum()),
        unused_change=site.measure_unused(),
    )


def _draw_twins(site: Site, loaded: list[int], rng: np.random.Generator) -> list[int]:
    """Draw for each of the most loaded another used expert that is chosen about as often."""
    left = [int(e) for e in np.flatnonzero(site.counts) if e not in loaded]
    twins = []
    for expert in loaded[: len(left)]:
        # Rarely chosen experts often tie: shuffle, so that chance decides which comes first.
        rng.shuffle(left)
        left.sort(key=lambda other: abs(int(site.counts[other]) - int(site.counts[expert])))
        twins.append(left.pop(int(rng.integers(min(NEAR, len(left))))))
    return twins

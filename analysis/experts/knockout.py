"""Which experts matter? Answers without the most loaded ones, their twins, and all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Bool
from torch import Tensor

from analysis.base import Finding, Subject, Table, thin
from analysis.experts.storage import (
    SHORTLIST,
    HeldAnswers,
    Site,
    build_sites,
    find_retrieval_layers,
    measure_held_answers,
)
from analysis.figures import Axis, Dots, Pairs, pairs
from analysis.plain import figure_only
from analysis.words import format_ends, percent
from lab.intervals import bootstrap_ratio
from tasks.base import count_rows

__all__ = ["TITLE", "measure"]

TITLE = "Experts knocked out"
TOKENS = 4096
"""Maximum number of tokens to run again for each deletion, unless below `FEWEST_ROWS` rows."""
FEWEST_ROWS = 4
PLANS = ((6, 8, 1.0), (6, 4, 1.0), (6, 3, 0.5), (4, 3, 0.25), (2, 3, 0.25), (2, 2, 0.25))
"""Layers, experts of each kind and share of the rows to measure; the first plan that is cheap
enough is chosen."""
WORK = 4e8
"""The most that is cheap enough: tokens × (`seq_len` + 1024) × blocks that run again, over all
deletions."""
MOST_ANSWERS, FEWEST_ANSWERS = 256, 16
"""Answers whose holders are searched."""
SLIGHT = 0.01
"""Change of loss that is negligible, nats: the right answers' probability changes by 1 %."""
NEAR = 5
"""A twin is drawn among this many experts whose number of choices is nearest."""
TABLED = 4
"""Roles that have a line in a table."""


@dataclass(frozen=True)
class AnswerChange:
    """What a deletion changes, means over the scored positions with 95 % intervals over rows.

    Attributes:
        loss: change of the loss, nats; above 0 if the experts were needed.
        loss_interval: its ends; NaN for a single row.
        accuracy: change of the accuracy, a share; below 0 if the experts were needed.
    """

    loss: float
    loss_interval: tuple[float, float]
    accuracy: float
    accuracy_interval: tuple[float, float]

    @property
    def harmful(self) -> bool:
        """Whether the deletion certainly raises the loss, and by more than a negligible amount."""
        return self.loss_interval[0] > 0 and self.loss >= SLIGHT

    @property
    def verdict(self) -> str:
        """What the experts do to the loss, as far as the interval tells."""
        low, high = self.loss_interval
        if low >= -SLIGHT and high <= SLIGHT:
            return "hardly matter to the answers"
        return "lower the loss" if low > 0 else "raise the loss" if high < 0 else "show no effect"

    def format_loss(self) -> str:
        """Return the change of loss as text, with its interval."""
        ends = format_ends(*self.loss_interval, format_change)
        return f"{format_change(self.loss)} {ends} nats"

    def format_accuracy(self) -> str:
        """Return the change of accuracy as text, with its interval."""
        ends = format_ends(*self.accuracy_interval, lambda end: f"{100 * end:+.1f}")
        return f"{100 * self.accuracy:+.1f} {ends} points"


def format_change(value: float) -> str:
    """Return a change of loss as text, with two decimals or two digits."""
    return f"{value:+.2f}" if abs(value) >= 0.1 else f"{value:+.2g}"


def measure_changes(
    site: Site,
    deleted: Bool[Tensor, "b t h k"],
    rng: np.random.Generator,
    role_names: Sequence[str] = (),
) -> dict[str, AnswerChange]:
    """Measure what a deletion changes: over all scored positions, "", and over each role's."""
    outcome = site.delete(deleted)
    loss = (outcome.losses - site.whole.losses).double().cpu().numpy()
    right = (outcome.right.int() - site.whole.right.int()).double().cpu().numpy()
    rows = site.clean.rows.cpu().numpy()
    roles = site.batch.roles[site.clean.rows, site.clean.positions].cpu().numpy()
    parts = {"": np.ones(len(rows), dtype=bool)}
    parts |= {role: roles == i for i, role in enumerate(role_names) if (roles == i).any()}

    def mean(values: np.ndarray, part: np.ndarray) -> tuple[float, tuple[float, float]]:
        # Rows are resampled whole: each by the sum and the number of its positions.
        sums = np.bincount(rows[part], values[part])
        sizes = np.bincount(rows[part])
        by_row = np.stack([sums, sizes], axis=1)[sizes > 0]
        return float(values[part].mean()), bootstrap_ratio(by_row, rng)

    return {
        name: AnswerChange(*mean(loss, part), *mean(right, part)) for name, part in parts.items()
    }


@dataclass(frozen=True)
class Deletion:
    """A run of the model without one expert.

    Attributes:
        place: its row and column key.
        twin: whether the expert is a placebo, chosen about as often as one of the most loaded.
        choices: its share of the layer's choices.
        load: its share of Σ |w|.
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
    title: str = figure_only()

    reading = (
        "Every dot is the model run again with w_e = 0 for one expert e. Whiskers are 95 % "
        "bootstrap intervals over rows, narrower than they should be with fewer than ten rows. "
        "Most loaded is by Σ |w_e|. Twins are placebos: used experts drawn so that they are chosen "
        "about as often; one expert stands out if its interval is above the worst of them. Experts "
        "that no token uses are set to zero as a check: the layer's output must stay."
    )

    @property
    def says(self) -> str:
        """Whether the layer's experts matter, and whether a single one stands out."""
        loaded, twins = ([d for d in self.deletions if d.twin is twin] for twin in (False, True))
        worst, highest = loaded[0].change, twins[0].change.loss if twins else np.nan
        # Of as many experts and twins with like effects, the worst is an expert half of the time.
        stands_out = worst.harmful and worst.loss_interval[0] > highest
        twin = format_change(highest) if twins else "–"
        return (
            f"The layer's experts {self.everything.verdict}: deleting all {self.n_experts:,} "
            f"changes the loss by {self.everything.format_loss()}, and "
            f"{'one' if stands_out else 'no single'} expert stands out among the most loaded: "
            f"deleting {loaded[0].place} changes it by {worst.format_loss()}, the worst of "
            f"{len(twins)} twins by {twin}."
        )

    def numbers(self) -> Table:
        """Return the answers with and without all experts, and what unused experts do."""
        parts = {"all tokens": self.everything}
        if len(self.by_answer) > 1:
            parts |= dict(thin(list(self.by_answer.items()), TABLED))
        whole = f"with all experts: {self.scored:,} answers in {self.rows} rows"
        unused = f"unused experts at zero: {self.unused:,}"
        rows = [
            (whole, f"{self.loss:.3g} nats", percent(self.accuracy)),
            *(
                (f"without any, answers at {role}", one.format_loss(), one.format_accuracy())
                for role, one in parts.items()
            ),
            (unused, f"output changes by {self.unused_change:.2g}", ""),
        ]
        return Table(("", "loss", "accuracy"), tuple(rows))

    def figure(self) -> go.Figure:
        """Draw the change of loss without each expert, the most harmful on top."""
        notes = [
            f"{d.place}, {percent(d.choices)} of choices, {percent(d.load)} of Σ|w|"
            for d in self.deletions
        ]
        loaded = [None if d.twin else d.change for d in self.deletions]
        twins = [d.change if d.twin else None for d in self.deletions]
        dots = draw_changes("most loaded", loaded, notes)
        others = draw_changes("twins, chosen as often", twins, notes)
        levels = {"": 0.0}
        if any(twins):
            levels["worst twin"] = float(np.nanmax(others.values))
        shown = [dots, replace(others, look="hollow")]
        panel = Pairs(shown, Axis("change of loss when deleted, nats"), levels=levels)
        return pairs([str(d.place) for d in self.deletions], panel, title="expert (row, column)")


def draw_changes(name: str, changes: Sequence[AnswerChange | None], notes: Sequence[str]) -> Dots:
    """Return dots of changes of loss with their intervals."""
    nothing = (np.nan, np.nan)
    ends = np.array([one.loss_interval if one else nothing for one in changes])
    loss = np.array([one.loss if one else np.nan for one in changes])
    return Dots(name, loss, ends, notes=notes)


def knock_out_layer(
    site: Site, role_names: Sequence[str], rng: np.random.Generator, n_experts: int = 8
) -> LayerKnockout:
    """Measure a layer without the `n_experts` most loaded, as many twins, and all experts."""
    loaded = [int(e) for e in np.argsort(-site.loads, kind="stable") if site.counts[e]]
    loaded = loaded[:n_experts]
    twins = draw_twins(site, loaded, rng)
    choices = site.counts / site.counts.sum()
    load = site.loads / max(site.loads.sum(), np.finfo(np.float64).tiny)
    deletions = [
        Deletion(
            place=divmod(expert, site.module.shape[1]),
            twin=twin,
            choices=float(choices[expert]),
            load=float(load[expert]),
            change=measure_changes(site, site.indices == expert, rng)[""],
        )
        for twin, experts in ((False, loaded), (True, twins))
        for expert in experts
    ]
    everywhere = torch.ones_like(site.indices, dtype=torch.bool)
    by_answer = measure_changes(site, everywhere, rng, role_names)
    by_role = []
    for i, role in enumerate(role_names):
        at = (site.batch.roles == i)[..., None, None]
        if at.any():
            every = measure_changes(site, everywhere & at, rng)[""]
            one = measure_changes(site, (site.indices == loaded[0]) & at, rng)[""]
            by_role.append(RoleDeletion(role, int(at.sum()), every, one))
    return LayerKnockout(
        layer=site.layer,
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
        title=f"Layer {site.layer} · {type(site.module).__name__} · loss without one expert",
    )


def draw_twins(site: Site, loaded: list[int], rng: np.random.Generator) -> list[int]:
    """Draw for each of the most loaded another used expert that is chosen about as often."""
    left = [int(e) for e in np.flatnonzero(site.counts) if e not in loaded]
    twins = []
    for expert in loaded[: len(left)]:
        # Rarely chosen experts often tie: shuffle, so that chance decides which comes first.
        rng.shuffle(left)
        left.sort(key=lambda other: abs(int(site.counts[other]) - int(site.counts[expert])))
        twins.append(left.pop(int(rng.integers(min(NEAR, len(left))))))
    return twins


@dataclass(frozen=True)
class RoleEffects(Finding):
    """Which tokens need the experts: `LayerKnockout.by_role` of all layers that were measured."""

    layers: tuple[LayerKnockout, ...]

    title = "Loss without experts at the tokens of one role"
    reading = (
        "Experts are deleted where tokens of one role use them, and kept elsewhere; the change is "
        "over all answers, also those at other tokens. Whiskers are 95 % bootstrap intervals over "
        "rows. One mark is for all experts of the layer together, the other for its most loaded "
        "one. Roles whose intervals overlap are not ranked."
    )

    @property
    def says(self) -> str:
        """At the tokens of which role deleting all experts raises the loss most, if at any."""
        entries = [(layer.layer, entry) for layer in self.layers for entry in layer.by_role]
        layer, worst = max(entries, key=lambda pair: pair[1].everything.loss)
        change = worst.everything
        alike = sum(e.everything.loss_interval[1] >= change.loss_interval[0] for _, e in entries)
        verdict = "No role is seen to need experts; the largest change is"
        if change.harmful:
            verdict = "Experts are needed most" if alike == 1 else "Experts are needed"
        return (
            f"{verdict} at {worst.role} tokens in layer {layer}: deleting all of them there "
            f"changes the loss by {change.format_loss()} and the accuracy by "
            f"{change.format_accuracy()} (others that may be as high: {max(alike - 1, 0)})."
        )

    def figure(self) -> go.Figure:
        """Draw the change of loss by layer and role, for all experts and for the most loaded."""
        entries = [(layer.layer, entry) for layer in self.layers for entry in layer.by_role]
        names = [f"layer {layer} · {entry.role}" for layer, entry in entries]
        notes = [
            f"{name}, {e.tokens:,} tokens" for name, (_, e) in zip(names, entries, strict=True)
        ]
        dots = [
            draw_changes("all experts", [e.everything for _, e in entries], notes),
            draw_changes("the most loaded", [e.one for _, e in entries], notes),
        ]
        axis = Axis("change of loss over all answers, nats")
        return pairs(names, Pairs(dots, axis, levels={"": 0}))


def plan_knockout(subject: Subject) -> tuple[tuple[int, ...], int, int]:
    """Return the first of `PLANS` that is cheap enough for this model and rows, or the last.

    Returns:
        which blocks, how many experts of each kind, and how many rows are measured.

    Raises:
        NotApplicableError: for a model without product-key experts.
    """
    blocks, seq_len = len(subject.model.blocks), subject.task.seq_len
    layers = list(find_retrieval_layers(subject.model))
    full = count_rows(TOKENS, seq_len, fewest=FEWEST_ROWS, most=len(subject.batch.inputs))
    plan = (), 0, 0
    for most_layers, n_experts, share in PLANS:
        tried = tuple(thin(layers, most_layers))
        rows = min(full, max(FEWEST_ROWS, round(share * full)))
        runs = 2 * n_experts + 1 + 2 * len(subject.task.role_names)
        again = sum(blocks - 1 - layer for layer in tried)
        plan = tried, n_experts, rows
        if rows * seq_len * (seq_len + 1024) * again * runs <= WORK:
            break
    return plan


def measure(subject: Subject) -> list[LayerKnockout | RoleEffects | HeldAnswers]:
    """Knock out experts of each layer, at the tokens of each role, and find who holds answers.

    Answers are those of the layer whose experts matter most. Roles are left out where all tokens
    have the same.

    Raises:
        NotApplicableError: for a model without product-key experts.
    """
    (tried, n_experts, count), names = plan_knockout(subject), subject.task.role_names
    rows, rng = subject.batch[:count], np.random.default_rng(subject.seed)
    sites = build_sites(subject.model, rows, tried)
    layers = tuple(knock_out_layer(site, names, rng, n_experts) for site in sites)
    best = int(np.argmax([found.everything.loss for found in layers]))
    # The search for an answer's holder takes several reruns.
    seq_len, again = subject.task.seq_len, max(1, len(subject.model.blocks) - 1 - tried[best])
    affordable = int(WORK // (SHORTLIST * seq_len * (seq_len + 1024) * again))
    affordable = min(MOST_ANSWERS, max(FEWEST_ANSWERS, affordable))
    held = measure_held_answers(sites[best], rng, affordable)
    by_role = [RoleEffects(layers)] if (rows.roles != rows.roles[0, 0]).any() else []
    return [*layers, *by_role, held]

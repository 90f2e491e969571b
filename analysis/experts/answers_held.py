"""Which expert holds which answer: the one without which, alone, the answer is lost.

q scored positions    e experts
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from analysis.experts.deletion import Site, retrieving, sites
from analysis.record import figure_only
from lab.models import LanguageModel
from tasks.base import IGNORE, Batch

SHORTLIST = 4
"""Experts that a row tries for each of its scored positions, unless it is told otherwise."""
HALVED = float(np.log(2))
"""Rise of the loss, nats, from which an answer may be held: it is half as likely, or less."""
LEAD = 2
"""How many times the effect of the runner-up the holder's is, at least."""
PART = 0.5
"""Share of what all the layer's experts are worth to the answer that the holder's is, at least."""
TOP = 8
"""Experts that are named."""
NAMED = 4
"""Answers of an expert that are named."""


@dataclass(frozen=True)
class Holding:
    """Which expert holds the fact behind each scored position.

    Attributes:
        layer: index of the block.
        rows: of the batch.
        positions: in the row.
        experts: whose deletion raises the loss most; −1 where no deletion that was tried does.
        effects: by how much, nats, ≥ 0.
        seconds: by how much the next one raises it: a fact that one expert holds has none.
        worth: by how much deleting all of the layer's experts raises it, nats, any sign.
        losses: with all experts.
        right: whether the answer is right with all experts.
        tried: how many experts were deleted for each.
    """

    layer: int
    rows: Int[np.ndarray, " q"]
    positions: Int[np.ndarray, " q"]
    experts: Int[np.ndarray, " q"]
    effects: Float[np.ndarray, " q"]
    seconds: Float[np.ndarray, " q"]
    worth: Float[np.ndarray, " q"]
    losses: Float[np.ndarray, " q"]
    right: Bool[np.ndarray, " q"]
    tried: Int[np.ndarray, " q"]

    @property
    def held(self) -> Bool[np.ndarray, " q"]:
        """Whether one expert holds a right answer: it halves it, leads, is much of the whole."""
        leads = (self.effects >= LEAD * self.seconds) & (self.effects >= PART * self.worth)
        return self.right & (self.effects >= HALVED) & leads


@dataclass(frozen=True)
class Holder:
    """An expert that holds answers.

    Attributes:
        place: its row and column key.
        answers: scored positions that it holds.
        effect: median rise of their losses without it, nats.
        targets: tokens that are the answers, most frequent first, with how often each.
    """

    place: tuple[int, int]
    answers: int
    effect: float
    targets: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Answers:
    """Which expert of a layer holds which answer.

    Attributes:
        layer: index of the block.
        kind: the layer's class.
        rows: of the batch, on which it was tried.
        asked: scored positions that were looked at, drawn at random.
        held: of these, how many one expert holds (`Holding.held`).
        halved: how many are half as likely, or less, without the expert that matters most.
        rivals: how many also without the runner-up.
        lost: how many without all of the layer's experts.
        effect: median and 90 % quantile of the rise of the loss without one expert, nats.
        holders: experts that hold any.
        kind_of: what two answers may have in common: a token, or where the task links any, a fact.
        same: share of pairs of held answers of one such whose expert is one; NaN without any.
        any_two: the same of all pairs of held answers: what chance would make of it.
        top: the experts that hold most.
        effects: rise of each answer's loss without the expert that matters most, nats.
        seconds: without the runner-up.
        by_one: whether one expert holds it.
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
    top: tuple[Holder, ...]
    effects: Float[np.ndarray, " q"] = figure_only()
    seconds: Float[np.ndarray, " q"] = figure_only()
    by_one: Bool[np.ndarray, " q"] = figure_only()


def answers_held(
    model: LanguageModel,
    batch: Batch,
    layer: int,
    rng: np.random.Generator,
    most: int = 1024,
    shortlist: int = SHORTLIST,
) -> Answers:
    """Return which expert of a layer holds which answer, of some of a batch's.

    Args:
        model: a language model.
        batch: rows, of any task.
        layer: index of a block with product-key experts.
        rng: draws the answers.
        most: answers that are looked at, at most.
        shortlist: of `holders`.
    """
    some = asked(batch, most, rng)
    found = holders(model, some, layer, shortlist=shortlist)
    module = retrieving(model)[layer]
    targets = some.targets.cpu().numpy()[found.rows, found.positions]
    facts = _facts(some, found)
    held = found.held
    experts, counts = np.unique(found.experts[held], return_counts=True)
    first = np.argsort(-counts, kind="stable")[:TOP]
    return Answers(
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
        same=_together(found.experts[held], (targets if facts is None else facts)[held]),
        any_two=_together(found.experts[held], np.zeros_like(targets[held])),
        top=tuple(
            _holder(int(expert), module.shape[1], found, targets) for expert in experts[first]
        ),
        effects=found.effects,
        seconds=found.seconds,
        by_one=held,
    )


def _facts(batch: Batch, found: Holding) -> Int[np.ndarray, " q"] | None:
    """Return which fact each scored position asks for; None where the task links none."""
    if "fact" not in batch.links:
        return None
    query, fact = batch.links["query_pos"], batch.links["fact"]
    # Padding, −1, lands in one more column.
    at = torch.full((len(query), batch.inputs.shape[1] + 1), -1, device=query.device)
    return at.scatter_(1, query % at.shape[1], fact).cpu().numpy()[found.rows, found.positions]


def asked(batch: Batch, most: int, rng: np.random.Generator) -> Batch:
    """Return a batch in which at most so many positions are scored, drawn at random."""
    places = (batch.targets.flatten() != IGNORE).nonzero()[:, 0]
    if len(places) <= most:
        return batch
    kept = places[torch.from_numpy(rng.choice(len(places), most, replace=False)).to(places.device)]
    targets = torch.full_like(batch.targets, IGNORE).flatten()
    targets[kept] = batch.targets.flatten()[kept]
    return replace(batch, targets=targets.view_as(batch.targets))


def _holder(expert: int, columns: int, found: Holding, targets: Int[np.ndarray, " q"]) -> Holder:
    own = found.held & (found.experts == expert)
    tokens, times = np.unique(targets[own], return_counts=True)
    first = np.argsort(-times, kind="stable")[:NAMED]
    return Holder(
        place=(expert // columns, expert % columns),
        answers=int(own.sum()),
        effect=float(np.median(found.effects[own])),
        targets=tuple((int(tokens[i]), int(times[i])) for i in first),
    )


def _together(experts: Int[np.ndarray, " n"], kinds: Int[np.ndarray, " n"]) -> float:
    """Return the share of pairs of one kind that have one expert; NaN without pairs."""

    def pairs(*labels: Int[np.ndarray, " n"]) -> int:
        times = np.unique(np.stack(labels), axis=1, return_counts=True)[1]
        return int((times * (times - 1) // 2).sum())

    possible = pairs(kinds)
    return pairs(kinds, experts) / possible if possible else float("nan")


def holders(
    model: LanguageModel, batch: Batch, layer: int, *, shortlist: int | None = SHORTLIST
) -> Holding:
    """Return for each scored position the expert whose deletion from its row raises its loss most.

    >>> facts = holders(model, batch, layer=0)  # doctest: +SKIP
    >>> batch.inputs[facts.rows, facts.positions], facts.experts  # doctest: +SKIP

    Every effect is of a rerun without the expert; the shortlist alone is to first order.

    Args:
        model: a language model.
        batch: rows, of any task.
        layer: index of a block with product-key experts.
        shortlist: how many experts a row tries for each of its scored positions, those with the
            largest `Site.attribution` in the row; None tries all that the row chooses.

    Raises:
        NotApplicableError: for a model without such experts.
        ValueError: for a layer that has none, or a shortlist below 1.
    """
    if shortlist is not None and shortlist < 1:
        raise ValueError(f"{shortlist=}: must be ≥ 1, or None for all")
    site = sites(model, batch, [layer])[0]
    row_of, expert_of = _shortlisted(site, shortlist)
    best = torch.zeros_like(site.whole.losses)
    second, holder = best.clone(), torch.full_like(site.clean.rows, -1)
    for expert in expert_of.unique():
        rows = row_of[expert_of == expert]
        change = site.without(site.choosing(int(expert), rows=rows)).losses - site.whole.losses
        leads = change > best
        second = torch.where(leads, best, torch.maximum(second, change))
        best, holder = torch.where(leads, change, best), torch.where(leads, expert, holder)
    everything = site.without(torch.ones_like(site.indices, dtype=torch.bool))
    tried = torch.bincount(row_of, minlength=len(site.indices))[site.clean.rows]
    return Holding(
        layer,
        *(
            part.cpu().numpy()
            for part in (site.clean.rows, site.clean.positions, holder, best, second)
        ),
        worth=(everything.losses - site.whole.losses).cpu().numpy(),
        losses=site.whole.losses.cpu().numpy(),
        right=site.whole.right.cpu().numpy(),
        tried=tried.cpu().numpy(),
    )


def _shortlisted(
    site: Site, shortlist: int | None
) -> tuple[Int[Tensor, " pairs"], Int[Tensor, " pairs"]]:
    """Return (row, expert) of what is tried: per row the experts of largest attribution."""
    n_rows = len(site.indices)
    keys = site.indices + site.n_experts * torch.arange(n_rows, device=site.indices.device).view(
        -1, 1, 1, 1
    )
    pairs, place = keys.flatten().unique(return_inverse=True)
    rows = pairs // site.n_experts
    if shortlist is not None:
        harm = torch.zeros(len(pairs), dtype=torch.float64, device=pairs.device)
        harm.index_add_(0, place, site.attribution().flatten().double())
        # Rows in order, each with its largest first; then the rank within the row.
        order = harm.argsort(descending=True, stable=True)
        order = order[rows[order].argsort(stable=True)]
        sizes = torch.bincount(rows, minlength=n_rows)
        start = (sizes.cumsum(0) - sizes)[rows[order]]
        rank = torch.arange(len(order), device=order.device) - start
        most = shortlist * torch.bincount(site.clean.rows, minlength=n_rows)[rows[order]]
        pairs = pairs[order[rank < most]]
        rows = pairs // site.n_experts
    return rows, pairs % site.n_experts

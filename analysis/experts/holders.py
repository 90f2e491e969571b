"""For each scored position, the expert whose deletion raises its loss most.

q scored positions    e experts
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from analysis.experts.sites import Site, build_sites
from lab.models import LanguageModel
from tasks.base import IGNORE, Batch

SHORTLIST = 4
"""Experts that a row tries for each of its scored positions, by default."""
HALVED = float(np.log(2))
"""Rise of the loss, nats, at which an answer is half as likely: the least for it to be held."""
LEAD = 2
"""The effect of the holder is at least this many times that of the runner-up."""
PART = 0.5
"""The effect of the holder is at least this share of the effect of all the layer's experts."""


@dataclass(frozen=True)
class Holding:
    """Which expert each scored position depends on most.

    Attributes:
        layer: index of the block.
        rows: of the batch.
        positions: in the row.
        experts: whose deletion raises the loss most; −1 where no deletion that was tried raises it.
        effects: by how much, nats, ≥ 0.
        seconds: by how much the runner-up raises it.
        worth: by how much deleting all of the layer's experts raises it, nats, any sign.
        losses: with all experts, nats.
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
        """Whether one expert holds a right answer: `HALVED`, `LEAD` and `PART` are all reached."""
        leads = (self.effects >= LEAD * self.seconds) & (self.effects >= PART * self.worth)
        return self.right & (self.effects >= HALVED) & leads


def find_holders(
    model: LanguageModel, batch: Batch, layer: int, *, shortlist: int | None = SHORTLIST
) -> Holding:
    """Find the expert whose deletion from its row raises the loss of each scored position most.

    Every effect is measured by a rerun without the expert; only the shortlist is to first order.

    Args:
        model: a language model.
        batch: rows, of any task.
        layer: index of a block with product-key experts.
        shortlist: how many experts a row tries for each of its scored positions, those with the
            largest `Site.attribute` in the row; None tries all that the row chooses.

    Raises:
        NotApplicableError: for a model without such experts.
        ValueError: for a layer that has none, or a shortlist below 1.
    """
    if shortlist is not None and shortlist < 1:
        raise ValueError(f"{shortlist=}: must be ≥ 1, or None for all")
    site = build_sites(model, batch, [layer])[0]
    row_of, expert_of = _shortlist(site, shortlist)
    best = torch.zeros_like(site.whole.losses)
    second, holder = best.clone(), torch.full_like(site.clean.rows, -1)
    for expert in expert_of.unique():
        rows = row_of[expert_of == expert]
        change = site.delete(site.select(int(expert), rows=rows)).losses - site.whole.losses
        leads = change > best
        second = torch.where(leads, best, torch.maximum(second, change))
        best, holder = torch.where(leads, change, best), torch.where(leads, expert, holder)
    everything = site.delete(torch.ones_like(site.indices, dtype=torch.bool))
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


def _shortlist(
    site: Site, shortlist: int | None
) -> tuple[Int[Tensor, " pairs"], Int[Tensor, " pairs"]]:
    """Return the rows and experts to try: in each row the experts of largest attribution."""
    n_rows = len(site.indices)
    keys = site.indices + site.n_experts * torch.arange(n_rows, device=site.indices.device).view(
        -1, 1, 1, 1
    )
    pairs, place = keys.flatten().unique(return_inverse=True)
    rows = pairs // site.n_experts
    if shortlist is not None:
        harm = torch.zeros(len(pairs), dtype=torch.float64, device=pairs.device)
        harm.index_add_(0, place, site.attribute().flatten().double())
        # Sort by row, each with its largest first; then rank within the row.
        order = harm.argsort(descending=True, stable=True)
        order = order[rows[order].argsort(stable=True)]
        sizes = torch.bincount(rows, minlength=n_rows)
        start = (sizes.cumsum(0) - sizes)[rows[order]]
        rank = torch.arange(len(order), device=order.device) - start
        most = shortlist * torch.bincount(site.clean.rows, minlength=n_rows)[rows[order]]
        pairs = pairs[order[rank < most]]
        rows = pairs // site.n_experts
    return rows, pairs % site.n_experts


def draw_answers(batch: Batch, most: int, rng: np.random.Generator) -> Batch:
    """Keep at most `most` of the scored positions of a batch, drawn at random."""
    places = (batch.targets.flatten() != IGNORE).nonzero()[:, 0]
    if len(places) <= most:
        return batch
    kept = places[torch.from_numpy(rng.choice(len(places), most, replace=False)).to(places.device)]
    targets = torch.full_like(batch.targets, IGNORE).flatten()
    targets[kept] = batch.targets.flatten()[kept]
    return replace(batch, targets=targets.view_as(batch.targets))

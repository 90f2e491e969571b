"""Which expert holds which answer? What a model answers without some of a layer's experts.

An expert adds w_e up_e to the residual stream wherever it is chosen. A deletion subtracts that
behind the block, and only later blocks run again, on the rows that it changes. This works for
CDMoE and PEER; φ, which all tokens share, stays.

    n choices that are deleted    q scored positions    e experts
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from analysis.base import Finding, NotApplicableError, Table
from analysis.figures import Axis, Curves, Line, curves
from analysis.plain import figure_only
from analysis.scoring import Scored, scored
from analysis.words import format_nats, percent
from lab.hooks import HookPoint
from lab.intervals import wilson
from lab.layers.retrieval import RetrievedExperts
from lab.models import LanguageModel
from lab.models.evaluation import tell_oracle_masks
from lab.ops.experts import expert_scores, expert_sum
from tasks.base import Batch

SHORTLIST = 4
"""Experts that a row tries for each of its scored positions, by default."""
HALVED = float(np.log(2))
"""Rise of the loss, nats, at which an answer is half as likely: the least for it to be held."""
LEAD = 2
"""The effect of the holder is at least this many times that of the runner-up."""
PART = 0.5
"""The effect of the holder is at least this share of the effect of all the layer's experts."""
FEW = 0.01
"""Single experts must hold more than this share of the answers for certain, as some are luck."""
TOP = 4
"""Experts that are named."""
NAMED = 4
"""Answers of an expert that are named."""
FLOOR = 1e-4
"""Lower end of the axes, nats; smaller effects are drawn there."""


class ScoredAnswers(NamedTuple):
    """Loss (cross-entropy, nats) and whether the answer is right, at each scored position."""

    losses: Float[Tensor, " q"]
    right: Bool[Tensor, " q"]


@dataclass(frozen=True)
class Site:
    """A layer with product-key experts, and its activations on a batch.

    Attributes:
        indices: of the experts chosen.
        weights: the factor of each one's `up`.
        before: the residual stream that the layer's norm reads.
        after: the residual stream behind the block.
        clean: what the model answers with all experts.
    """

    model: LanguageModel
    batch: Batch
    layer: int
    module: RetrievedExperts
    indices: Int[Tensor, "b t h k"]
    weights: Float[Tensor, "b t h k"]
    before: Float[Tensor, "b t d"]
    after: Float[Tensor, "b t d"]
    clean: Scored

    @property
    def n_experts(self) -> int:
        """Rows of the layer's tables."""
        return len(self.module.down)

    @cached_property
    def whole(self) -> ScoredAnswers:
        """Loss and answers with all experts."""
        with torch.no_grad():
            return ScoredAnswers(self.clean.losses, self.clean.right)

    @cached_property
    def counts(self) -> Int[np.ndarray, " experts"]:
        """How often each expert is chosen."""
        return torch.bincount(self.indices.flatten(), minlength=self.n_experts).cpu().numpy()

    @cached_property
    def loads(self) -> Float[np.ndarray, " experts"]:
        """Each expert's Σ |w_e| over the choices."""
        size = self.weights.abs().double().flatten()
        return torch.bincount(self.indices.flatten(), size, self.n_experts).cpu().numpy()

    @torch.no_grad()
    def delete(self, deleted: Bool[Tensor, "b t h k"]) -> ScoredAnswers:
        """Return loss and answers when these choices have weight 0.

        Rows in which nothing is deleted keep theirs, to the bit.
        """
        touched = deleted.flatten(1).any(1)
        rows = touched.nonzero()[:, 0]
        if not len(rows):
            return self.whole
        gone = expert_sum(
            self.weights[rows] * deleted[rows], self.module.up, self.indices[rows], "gather"
        )
        again = touched[self.clean.rows]
        found = self._answer(self.after[rows] - gone, rows, again)
        losses, right = self.whole.losses.clone(), self.whole.right.clone()
        losses[again], right[again] = found.losses, found.right
        return ScoredAnswers(losses, right)

    @torch.no_grad()
    def measure_unused(self) -> float:
        """Return the largest change of the layer's output when unused experts are zero.

        It is exactly 0, unless something reads them.
        """
        norm = self.model.blocks[self.layer].norm_mlp
        assert isinstance(norm, nn.Module)
        z = norm(self.before)
        used = torch.from_numpy(self.counts > 0).to(z.device)[:, None]
        tables = {"down": self.module.down * used, "up": self.module.up * used}
        changed = functional_call(self.module, tables, (z,)) - self.module(z)
        return changed.abs().max().item()

    def attribute(self) -> Float[Tensor, "b t h k"]:
        """Return how much the loss of a row would rise without each choice, to first order.

            −w_e up_e · ∂L/∂y,  L the sum of a row's losses, y the residual stream behind the block

        In nats; exact if L is linear between y and y − w_e up_e.
        """
        with torch.enable_grad():
            after = self.after.detach().requires_grad_()
            rows = torch.arange(len(after), device=after.device)
            every = torch.ones_like(self.clean.rows, dtype=torch.bool)
            total = self._answer(after, rows, every).losses.sum()
            gradient = torch.autograd.grad(total, after)[0]
        with torch.no_grad():
            along = expert_scores(gradient, self.module.up, self.indices, "gather")
        return -self.weights * along

    def _answer(
        self, x: Float[Tensor, "r t d"], rows: Int[Tensor, " r"], asked: Bool[Tensor, " q"]
    ) -> Scored:
        """Run the later blocks on some rows, and return what is answered where it is asked."""
        with tell_oracle_masks(self.model, self.batch, rows):
            for block in self.model.blocks[self.layer + 1 :]:
                x = block(x)
        positions, place = self.clean.positions[asked], torch.searchsorted(rows, self.clean.rows)
        hidden = self.model.norm_final(x)[place[asked], positions]
        return Scored(place[asked], positions, self.clean.targets[asked], hidden, self.clean.head)


def find_retrieval_layers(model: LanguageModel) -> dict[int, RetrievedExperts]:
    """Find the layers with product-key experts, by index of the block.

    Raises:
        NotApplicableError: when there are none.
    """
    modules = {
        layer: block.mlp
        for layer, block in enumerate(model.blocks)
        if isinstance(block.mlp, RetrievedExperts)
    }
    if not modules:
        raise NotApplicableError("no block retrieves experts by product keys")
    return modules


@torch.no_grad()
def build_sites(
    model: LanguageModel, batch: Batch, layers: Collection[int] | None = None
) -> list[Site]:
    """Run a model on a batch, and return its layers with product-key experts, or some of them.

    Raises:
        NotApplicableError: for a model without such a layer.
    """
    modules = find_retrieval_layers(model)
    layers = sorted(modules if layers is None else layers)
    cache: dict[str, Tensor] = {}

    def keep(tensor: Tensor, point: HookPoint) -> None:
        cache[point.name] = tensor

    names = (
        *("mlp.hook_expert_indices", "mlp.hook_expert_weights"),
        *("hook_resid_mid", "hook_resid_post"),
    )
    wanted = [f"blocks.{layer}.{name}" for layer in layers for name in names]
    with model.hooks([(wanted, keep)]):
        clean = scored(model, batch)
    return [
        Site(model, batch, layer, modules[layer], *parts, clean=clean)
        for layer in layers
        for parts in [[cache[f"blocks.{layer}.{name}"] for name in names]]
    ]


@dataclass(frozen=True)
class Holding:
    """Which expert each scored position depends on most.

    Attributes:
        experts: whose deletion raises the loss most; −1 where no deletion that was tried raises it.
        effects: by how much, nats, ≥ 0.
        seconds: by how much the runner-up raises it.
        worth: by how much deleting all of the layer's experts raises it, nats, any sign.
    """

    rows: Int[np.ndarray, " q"]
    positions: Int[np.ndarray, " q"]
    experts: Int[np.ndarray, " q"]
    effects: Float[np.ndarray, " q"]
    seconds: Float[np.ndarray, " q"]
    worth: Float[np.ndarray, " q"]
    right: Bool[np.ndarray, " q"]

    @property
    def held(self) -> Bool[np.ndarray, " q"]:
        """Whether one expert holds a right answer: `HALVED`, `LEAD` and `PART` are all reached."""
        leads = (self.effects >= LEAD * self.seconds) & (self.effects >= PART * self.worth)
        return self.right & (self.effects >= HALVED) & leads


def find_holders(site: Site) -> Holding:
    """Find the expert whose deletion from its row raises the loss of each scored position most.

    Every effect is measured by a rerun without the expert; only the shortlist is to first order.
    """
    row_of, expert_of = choose_candidates(site)
    best = torch.zeros_like(site.whole.losses)
    second, holder = best.clone(), torch.full_like(site.clean.rows, -1)
    for expert in expert_of.unique():
        there = torch.zeros(len(site.indices), dtype=torch.bool, device=best.device)
        there[row_of[expert_of == expert]] = True
        deleted = (site.indices == expert) & there[:, None, None, None]
        change = site.delete(deleted).losses - site.whole.losses
        leads = change > best
        second = torch.where(leads, best, torch.maximum(second, change))
        best, holder = torch.where(leads, change, best), torch.where(leads, expert, holder)
    everything = site.delete(torch.ones_like(site.indices, dtype=torch.bool))
    worth = everything.losses - site.whole.losses
    where = site.clean.rows, site.clean.positions
    parts = *where, holder, best, second, worth, site.whole.right
    return Holding(*(part.cpu().numpy() for part in parts))


def choose_candidates(site: Site) -> tuple[Int[Tensor, " pairs"], Int[Tensor, " pairs"]]:
    """Return the rows and experts to try: in each row the experts of largest attribution."""
    harm = site.attribute().double()
    answers = torch.bincount(site.clean.rows, minlength=len(site.indices)).tolist()
    rows, experts = [], []
    for row, chosen in enumerate(site.indices.flatten(1)):
        kept, place = chosen.unique(return_inverse=True)
        total = harm.new_zeros(len(kept)).index_add_(0, place, harm[row].flatten())
        kept = kept[total.topk(min(len(kept), SHORTLIST * answers[row])).indices]
        rows.append(torch.full_like(kept, row))
        experts.append(kept)
    return torch.cat(rows), torch.cat(experts)


@dataclass(frozen=True)
class Holder:
    """An expert that holds answers.

    Attributes:
        place: its row and column key.
        targets: the most frequent tokens of the answers, and how often each occurs.
    """

    place: tuple[int, int]
    answers: int
    targets: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        named = ", ".join(f"{token} × {times}" for token, times in self.targets)
        complete = self.answers == sum(times for _, times in self.targets)
        return f"{self.answers:,}: {named}{'' if complete else ', …'}"


@dataclass(frozen=True)
class HeldAnswers(Finding):
    """Which expert of a layer holds which answer.

    Attributes:
        asked: how many scored positions were measured, drawn at random.
        held: how many of these one expert holds (`Holding.held`).
        halved: how many are half as likely, or less, without the expert that matters most.
        rivals: how many are half as likely, or less, without the runner-up.
        lost: how many are half as likely, or less, without all of the layer's experts.
        effect: median and 90 % quantile of the rise of the loss without one expert, nats.
        kind_of: what makes two answers the same: a fact, if the task links facts, else a token.
        same: share of pairs of held answers, same by `kind_of`, that have the same expert; NaN
            without such pairs.
        any_two: that share among all pairs of held answers, for comparison.
        copies: how many experts have the same weights as another.
        effects: rise of each answer's loss without the expert that matters most, nats.
        seconds: the same without the runner-up.
        by_one: whether one expert holds the answer.
    """

    layer: int
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
    title: str = figure_only()

    reading = (
        "Each dot is one of the answers, drawn at random. An expert holds a right answer if, "
        "without it, the loss rises by at least log 2, which makes the answer half as likely, by "
        f"{LEAD} times as much as without any other expert that was tried, and by half as much as "
        "without all of the layer's experts. Experts are tried if their effect is "
        "large to first order; every effect is measured by a rerun. The table names the experts "
        "that hold most, with the tokens of their answers and how often each occurs. Of experts "
        "with the same weights one can stand in for the other where a token chooses both."
    )

    @property
    def says(self) -> str:
        """How many answers single experts hold, beside what several hold together."""
        share = self.held / self.asked
        few = wilson(share, self.asked)[0] <= FEW
        verdict = "Hardly any answer is held" if few else "Answers are held"
        return (
            f"{verdict} by one expert alone: {self.held:,} of {self.asked:,} ({percent(share)}) in "
            f"layer {self.layer}; without the expert that matters most {self.halved:,} are half as "
            f"likely or less, without the runner-up {self.rivals:,}, without all {self.lost:,}."
        )

    def numbers(self) -> Table:
        """Return the experts that hold most answers, and how facts and experts go together."""
        rows = [(f"held by expert {one.place}", str(one)) for one in self.top]
        median, high = map(format_nats, self.effect)
        same = "–" if math.isnan(self.same) else percent(self.same)
        chance = "–" if math.isnan(self.any_two) else percent(self.any_two)
        rows += [
            ("experts that hold any", f"{self.holders:,}"),
            (f"same {self.kind_of}, same expert (any two)", f"{same} ({chance})"),
            ("rise without one expert, median and 90 %", f"{median} and {high} nats"),
            ("experts with the weights of another", f"{self.copies:,}"),
        ]
        return Table(("", "answers"), tuple(rows))

    def figure(self) -> go.Figure:
        """Draw the two largest effects on each answer, and the bounds of what is held."""
        x, y = np.maximum(self.seconds, FLOOR), np.maximum(self.effects, FLOOR)
        top = 1.5 * max(float(y.max()), 2 * HALVED)
        bound = np.array([FLOOR, top / LEAD])
        # Below the first line the runner-up is too near; below the other the effect is small.
        lines = [Line(f"{LEAD} × the runner-up", bound, LEAD * bound, look=-1)]
        kinds = {"held by one": self.by_one, "no one expert": ~self.by_one}
        for look, (name, kept) in enumerate(kinds.items()):
            lines.append(Line(name, x[kept], y[kept], shape="points", look=look))
        titles = "loss without the runner-up, rise in nats", "without the expert that matters most"
        across, up = (Axis(title, scale="log", ends=(FLOOR / 1.25, top)) for title in titles)
        return curves([Curves(lines, up, levels={"half as likely": HALVED}, height=300)], across)


def measure_held_answers(site: Site, rng: np.random.Generator, most: int = 1024) -> HeldAnswers:
    """Measure which expert of a layer holds which answers, of at most `most` that are drawn."""
    layer, module, clean = site.layer, site.module, site.clean
    if len(clean.rows) > most:
        drawn = np.sort(rng.choice(len(clean.rows), most, replace=False))
        kept = torch.from_numpy(drawn).to(clean.rows.device)
        parts = clean.rows, clean.positions, clean.targets, clean.hidden
        clean = Scored(*(part[kept] for part in parts), head=clean.head)
    found, targets = find_holders(replace(site, clean=clean)), clean.targets.cpu().numpy()
    facts, held = _find_facts(site.batch, found), found.held
    experts, counts = np.unique(found.experts[held], return_counts=True)
    top = []
    for expert in experts[np.argsort(-counts, kind="stable")[:TOP]]:
        own = held & (found.experts == expert)
        tokens, times = np.unique(targets[own], return_counts=True)
        first = np.argsort(-times, kind="stable")[:NAMED]
        named = tuple(zip(tokens[first].tolist(), times[first].tolist(), strict=True))
        top.append(Holder(divmod(int(expert), module.shape[1]), int(own.sum()), named))
    tables = torch.cat([module.down, module.up], dim=1).detach()
    alike = tables.unique(dim=0, return_counts=True)[1]
    return HeldAnswers(
        layer=layer,
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
        copies=int(alike[alike > 1].sum()),
        top=tuple(top),
        effects=found.effects,
        seconds=found.seconds,
        by_one=held,
        title=f"Layer {layer} · {type(module).__name__} · which expert holds which answer",
    )


def _find_facts(batch: Batch, found: Holding) -> Int[np.ndarray, " q"] | None:
    """Return the fact that each scored position asks for; None if the task links no facts."""
    if "fact" not in batch.links:
        return None
    query, fact = batch.links["query_pos"], batch.links["fact"]
    # Padding, −1, goes to an additional column.
    at = torch.full((len(query), batch.inputs.shape[1] + 1), -1, device=query.device)
    return at.scatter_(1, query % at.shape[1], fact).cpu().numpy()[found.rows, found.positions]


def _share_together(experts: Int[np.ndarray, " n"], kinds: Int[np.ndarray, " n"]) -> float:
    """Return the share of pairs of the same kind with the same expert; NaN without pairs."""

    def count_pairs(*labels: Int[np.ndarray, " n"]) -> int:
        times = np.unique(np.stack(labels), axis=1, return_counts=True)[1]
        return int((times * (times - 1) // 2).sum())

    possible = count_pairs(kinds)
    return count_pairs(kinds, experts) / possible if possible else math.nan

"""Which values does inner function attention use, what for, and does it matter which?

It matters if the accuracy changes when tokens get other values, at the weights of their own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from analysis.base import Finding, NotApplicableError, Subject, Table, thin
from analysis.figures import Axis, Colors, Map, heat
from analysis.scoring import Scored, estimate_accuracy, scored, sum_by_row
from analysis.statistics.comparisons import SURE, westfall_young
from analysis.value_usage.choices import (
    LAYERS,
    ValueUses,
    find_value_layers,
    measure_histories,
    measure_usage,
    record_choices,
)
from analysis.words import percent
from lab.hooks import HookPoint
from lab.intervals import Estimate, estimate_ratio
from tasks.base import Batch, count_rows

__all__ = ["TITLE", "measure"]

TITLE = "Which values inner function attention uses"
MOST = 5
"""Maximum number of values of a layer that are forced, those that are chosen most."""
PASSES = 64
"""Maximum number of swaps in all, beyond one value for each layer."""
TOKENS = 2**18
"""Number of tokens answered again in all; each swap gets as many rows as that allows."""
FEWEST_ROWS = 4
Reassign = Callable[[Int[Tensor, "b t k"]], Int[Tensor, "b t k"]]
"""From the values that tokens choose to those that they get."""


def measure(subject: Subject) -> list[Finding]:
    """Return the use of values, a history per layer if the run kept its weights, and swaps.

    Raises:
        NotApplicableError: if no block looks values up.
    """
    if not find_value_layers(subject.model):
        raise NotApplicableError("no block looks its values up: none is inner function attention")
    rng = np.random.default_rng(subject.seed)
    roles, names = subject.batch.roles.cpu().numpy(), subject.task.role_names
    choices = record_choices(subject.model, subject.batch)
    uses = tuple(measure_usage(i, of, roles, len(names), rng) for i, of in choices.items())
    findings: list[Finding] = [ValueUses(uses, names)]
    if subject.run is not None and len(subject.run.list_steps()) > 1:
        findings += measure_histories(subject.run, subject.batch, rng)
    return [*findings, measure_swaps(subject, {layer.layer: layer.shares for layer in uses})]


@dataclass(frozen=True)
class Swap:
    """How the accuracy changes when tokens get other values, at the weights of their own.

    Attributes:
        value: the value that is forced; None where the tokens' own are shuffled among them.
        role: of the tokens it is forced on, index into role_names; None for all tokens.
        change: accuracy after less accuracy before, in [−1, 1]; chance 0.
        p: that the worst of all these swaps costs as much if none costs anything.
    """

    layer: int
    value: int | None
    role: int | None
    change: Estimate
    p: float

    @property
    def costs(self) -> bool:
        """Whether it is shown to cost accuracy."""
        return self.change.value < 0 and self.p < SURE


@dataclass(frozen=True)
class Swaps(Finding):
    """Every swap, and the accuracy before.

    Attributes:
        accuracy: before any swap; chance is the task's.
        placebo: largest change of a hidden state when tokens are forced to what they chose.
    """

    title = "Change of accuracy, in points, when values are forced"
    reading = (
        "Columns: the value that tokens get; those that are chosen most are forced. Rows: the "
        "tokens that get it. A forced value takes over the score, and so the weight, of the value "
        "that it replaces. Shuffling deals the tokens' own choices among them. p: the share of "
        "random sign flips of the rows in which the worst of all swaps costs as much; a star marks "
        f"a cost with p < {SURE}. Intervals: 95 %, by resampling rows, one swap at a time. "
        "Placebo: forcing each token's own choice."
    )
    accuracy: Estimate
    swaps: tuple[Swap, ...]
    placebo: float
    role_names: tuple[str, ...]

    @property
    def says(self) -> str:
        """How many swaps are shown to cost accuracy, and which is the most costly."""
        right, costly = self.accuracy, [swap for swap in self.swaps if swap.costs]
        # NaN, the interval of a single row, is not above chance either.
        if not right.low > right.chance:
            return (
                f"{percent(right.value)} of the answers are right, not shown to be above chance "
                f"({percent(right.chance)}): swaps cannot tell which values matter."
            )
        worst = min(costly or self.swaps, key=lambda swap: swap.change.value)
        return (
            f"{percent(right.value)} of the answers are right (chance {percent(right.chance)}); "
            f"swaps shown to cost accuracy: {len(costly)} of {len(self.swaps)}; the most costly, "
            f"{self._name(worst)} in layer {worst.layer}, changes it by {worst.change.points} "
            f"(p {worst.p:.2g})."
        )

    def numbers(self) -> Table:
        """Return each layer's shuffle, its most costly forced value, and the placebo."""
        rows = []
        for layer in dict.fromkeys(swap.layer for swap in self.swaps):
            mine = [swap for swap in self.swaps if swap.layer == layer]
            mine.sort(key=lambda swap: (swap.value is not None, swap.change.value))
            rows += [(f"{layer}", self._name(s), s.change.points, f"{s.p:.2g}") for s in mine[:2]]
        rows.append(("–", "placebo", f"hidden state moves by {self.placebo:.2g}", "–"))
        return Table(("layer", "swap", "change of accuracy", "p"), tuple(rows))

    def figure(self) -> go.Figure:
        """Draw the changes, a map per layer, a row per group of tokens, a column per value."""
        maps = []
        for layer in dict.fromkeys(swap.layer for swap in self.swaps):
            forced = [s for s in self.swaps if s.layer == layer and s.value is not None]
            forced.sort(key=lambda swap: swap.value or 0)
            values = list(dict.fromkeys(swap.value for swap in forced))
            roles = list(dict.fromkeys(swap.role for swap in forced))
            cells = [forced[i :: len(roles)] for i in range(len(roles))]
            maps.append(
                Map(
                    np.array([[100 * swap.change.value for swap in row] for row in cells]),
                    ["all tokens" if role is None else self.role_names[role] for role in roles],
                    [str(value) for value in values],
                    f"layer {layer}",
                    [[f"{100 * s.change.value:+.1f}{'*' * s.costs}" for s in row] for row in cells],
                    [[f"{self._name(s)}, {s.change.points}" for s in row] for row in cells],
                )
            )
        return heat(maps, Colors("points", ends=(-100, 100)), Axis("value that is forced"), Axis())

    def _name(self, swap: Swap) -> str:
        """Name a swap of a layer."""
        if swap.value is None:
            return "shuffling the choices"
        role = "every token" if swap.role is None else f"{self.role_names[swap.role]} tokens"
        return f"forcing value {swap.value} on {role}"


@torch.no_grad()
def measure_swaps(subject: Subject, loads: dict[int, Float[np.ndarray, " n_v"]]) -> Swaps:
    """Force each layer's most used values on all tokens, and on those of each role.

    Args:
        subject: swaps are scored on its first rows.
        loads: the share of tokens that choose each value, by layer.
    """
    layers = thin(list(loads), LAYERS)
    n_groups = 1 + len(subject.task.role_names)
    most = min(MOST, max(1, (PASSES // len(layers) - 2) // n_groups))
    passes = sum(2 + min(most, len(loads[layer])) * n_groups for layer in layers)
    seq_len = subject.batch.inputs.shape[1]
    batch = subject.batch[: count_rows(TOKENS, passes * seq_len, fewest=FEWEST_ROWS)]
    rng = np.random.default_rng(subject.seed)
    before = scored(subject.model, batch)
    roles = range(len(subject.task.role_names))
    groups: list[tuple[int | None, Bool[Tensor, "b t"]]] = [
        (None, torch.ones_like(batch.roles, dtype=torch.bool))
    ]
    groups += [(role, there) for role in roles if (there := batch.roles == role).any()]
    found, changes, placebo = [], [], 0.0
    for layer in layers:
        same = score_reassigned(subject, batch, layer, torch.clone)
        placebo = max(placebo, float((same.hidden - before.hidden).abs().max()))
        swaps: list[tuple[int | None, int | None, Reassign]] = [
            (None, None, partial(shuffle_choices, seed=subject.seed))
        ]
        for value in np.argsort(-loads[layer], kind="stable")[:most].tolist():
            for role, there in groups:
                swaps.append((value, role, partial(force_value, value=value, there=there)))
        for value, role, reassign in swaps:
            after = score_reassigned(subject, batch, layer, reassign)
            sums, counts = sum_by_row(before, after.right.double() - before.right.double())
            change = estimate_ratio(sums, counts, 0.0, rng)
            found.append(Swap(layer, value, role, change, math.nan))
            changes.append(sums.cpu().numpy())
    ps = westfall_young(np.stack(changes, 1), rng).tolist()
    return Swaps(
        accuracy=estimate_accuracy(before, subject.task.chance, rng),
        swaps=tuple(replace(swap, p=p) for swap, p in zip(found, ps, strict=True)),
        placebo=placebo,
        role_names=subject.task.role_names,
    )


def force_value(
    indices: Int[Tensor, "b t k"], value: int, there: Bool[Tensor, "b t"]
) -> Int[Tensor, "b t k"]:
    """Force a value on some tokens: it replaces the last choice of those that lack it."""
    missing = there & (indices != value).all(-1)
    last = torch.where(missing, value, indices[..., -1])
    return torch.cat([indices[..., :-1], last[..., None]], -1)


def shuffle_choices(indices: Int[Tensor, "b t k"], seed: int) -> Int[Tensor, "b t k"]:
    """Shuffle the choices among all tokens, so that each value is chosen as often as before."""
    flat = indices.flatten(0, 1)
    order = np.random.default_rng(seed).permutation(len(flat))
    return flat[torch.from_numpy(order).to(flat.device)].view_as(indices)


def reorder_scores(
    scores: Float[Tensor, "b t n_v"], after: Int[Tensor, "b t k"]
) -> Float[Tensor, "b t n_v"]:
    """Permute each token's own scores so that the values `after` have the highest, in their order.

    A value's weight comes from its score, which is low where it was not chosen. Taking over the
    score of the value it replaces, a swap shows the effect of the value and not of a low weight.
    """
    ranked = scores.argsort(dim=-1, descending=True, stable=True)
    taken = (ranked[..., :, None] == after[..., None, :]).any(-1)
    others = taken.int().argsort(dim=-1, stable=True)[..., : scores.shape[-1] - after.shape[-1]]
    order = torch.cat([after, ranked.gather(-1, others)], -1)
    return torch.empty_like(scores).scatter_(-1, order, scores.gather(-1, ranked))


def score_reassigned(subject: Subject, batch: Batch, layer: int, reassign: Reassign) -> Scored:
    """Return the answers with a layer's values reassigned."""
    name = f"blocks.{layer}.mixer.hook_value"
    k = find_value_layers(subject.model)[layer].n_chosen
    given: list[Tensor] = []

    def change_scores(scores: Tensor, point: HookPoint) -> Tensor:
        own = scores.argsort(dim=-1, descending=True, stable=True)[..., :k]
        given.append(reassign(own))
        return reorder_scores(scores, given[-1])

    def change_indices(indices: Tensor, point: HookPoint) -> Tensor:
        # Of tied scores the layer would choose the lower index.
        return given[-1]

    hooks = [(f"{name}_scores", change_scores), (f"{name}_indices", change_indices)]
    with subject.model.hooks(hooks):
        return scored(subject.model, batch)

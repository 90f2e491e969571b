"""What becomes of the old value when its key is written again, and does it need to be erased?

Only tasks that write a key several times and ask for its latest value have rewrites.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from analysis.base import Finding, Subject, Table, thin
from analysis.figures import Axis, Curves, Dots, Line, Pairs, curves, pairs
from analysis.interventions import ablate
from analysis.links import Offsets, find_pairs
from analysis.mechanism.couples import compute_answers
from analysis.scoring import scored
from analysis.words import name_head, percent
from lab.intervals import bootstrap_ratio
from tasks.base import Batch

BEFORE, AFTER = 2, 8
"""Tokens before and after a rewrite between which it is measured what is held."""
SHOWN = 6
"""Maximum number of heads with a panel; of more, those in which a rewrite makes most difference."""
LAYERS = 12
"""Maximum number of layers that are silenced; of more, evenly spaced ones."""
ARMS = {"hook_beta": "neither written nor erased (β = 0)", "hook_match": "written, nothing erased"}
"""The hook point that is set to 0 at the tokens of a write, and what then becomes of it. In RWKV-7,
a fiftieth of it is written with β = 0, too."""


@dataclass(frozen=True)
class Writes:
    """The writes of a row, those of a key side by side, in order.

    Attributes:
        query: position of the query for their key.
        key: position of their key.
        value: position of their value.
        following: the value's position in the next write of the same key; −1 for its latest.
    """

    query: Int[Tensor, " w"]
    key: Int[Tensor, " w"]
    value: Int[Tensor, " w"]
    following: Int[Tensor, " w"]

    @property
    def again(self) -> Bool[Tensor, " w"]:
        """Whether its key is written again later."""
        return self.following >= 0

    @property
    def rewrite(self) -> Bool[Tensor, " w"]:
        """Whether it is the latest write of a key that was written before."""
        return ~self.again & torch.isin(self.query, self.query[self.again])


def find_writes(batch: Batch) -> list[Writes]:
    """Return the writes of each row; none for a task, or rows, without rewrites."""
    if "first_value_pos" not in batch.links:
        return []
    found = []
    for row, (query, key, value) in enumerate(zip(*find_pairs(batch), strict=True)):
        real = query >= 0
        query, key, value = query[real], key[real], value[real]
        kinds = torch.stack([batch.inputs[row], batch.roles[row]], -1)
        pair, place = (kinds == kinds[key][:, None]).all(-1).nonzero(as_tuple=True)
        at = place + (value - key)[pair]
        following = torch.full_like(at, -1)
        following[:-1] = torch.where(pair[1:] == pair[:-1], at[1:], -1)
        found.append(Writes(query[pair], place, at, following))
    return found if any(writes.again.any() for writes in found) else []


def sum_held(
    held: Float[Tensor, "b h t s"],
    erased: Float[Tensor, "b h t s"],
    weight: Float[Tensor, "b h s"],
    writes: Sequence[Writes],
    read: int,
) -> Float[np.ndarray, "h b 2 d 2"]:
    """Sum up what is held of old values, and has been erased of them, from `BEFORE` a rewrite on.

    First of the value whose key is written again, then of those of other keys, if these are not
    written again until `AFTER` the rewrite. All are there from `BEFORE` it on.

    Args:
        held, erased, weight: as in `analysis.state_space.erasure.Traced`.
        read: how far after a value it is held.
    """
    b, h, t, _ = held.shape
    offsets = torch.arange(-BEFORE, AFTER + 1, device=held.device)
    sums = held.new_zeros(h, b, 2, len(offsets), 2, dtype=torch.float64)
    for row, of in enumerate(writes):
        of_row = torch.stack([held[row], erased[row].cumsum(1)]) * weight[row, :, None]
        start, until = of.value + read, torch.where(of.again, of.following + read, 2 * t)
        own = (of.again & (until + AFTER < t) & (start + BEFORE <= until)).nonzero()[:, 0]
        place = until[own, None] + offsets  # [e d]
        # Of all writes w at all rewrites e.
        mine = torch.arange(len(start), device=own.device) == own[:, None]
        others = (start <= place[:, :1]) & (until > place[:, -1:])
        found = of_row[:, :, place[..., None], start.clamp(max=t - 1)].double()  # [2 h e d w]
        found[1] -= found[1, :, :, :1].clone()
        for arm, chosen in enumerate((mine, others)):
            sums[:, row, arm] = (found * chosen[:, None]).sum((2, 4)).permute(1, 2, 0)
    return sums.cpu().numpy()


@dataclass(frozen=True)
class Held(Finding):
    """What each head still holds of an old value after its key is written again.

    Shares are those of what is held `BEFORE` the rewrite; NaN where there is no such value.

    Attributes:
        layers: the block of each head.
        heads: its index in the block.
        offsets: tokens since the rewrite, < 0 before it.
        held: the share of the old value, then that of values of other keys.
        interval: 95 %, over rows.
        erased: the shares that tokens have erased of them until the last of the offsets; what is
            neither held then nor erased has decayed.
        erased_interval: 95 %, over rows.
    """

    layers: Int[np.ndarray, " h"]
    heads: Int[np.ndarray, " h"]
    offsets: Int[np.ndarray, " d"]
    held: Float[np.ndarray, "h 2 d"]
    interval: Float[np.ndarray, "h 2 d 2"]
    erased: Float[np.ndarray, "h 2"]
    erased_interval: Float[np.ndarray, "h 2 2"]

    title = "What is held of an old value when its key is written again"
    reading = (
        "How much of a value the state holds at its own key, by tokens since the rewrite of that "
        f"key, as a share of what it holds {BEFORE} tokens before; beside it values of other "
        "keys, which are not written again. A delta rule takes the old value away at the rewrite "
        "and leaves most of the others. An additive state erases nothing: both decay alike, or "
        "stay. Bars are 95 % intervals over rows. Of many heads, those are drawn in which most "
        "more is erased of the old value than of others."
    )

    @classmethod
    def of(
        cls,
        layers: Int[np.ndarray, " h"],
        heads: Int[np.ndarray, " h"],
        sums: Float[np.ndarray, "h b 2 d 2"],
        seed: int,
    ) -> "Held":
        """Return the shares from what `sum_held` sums up for all heads."""
        rng = np.random.default_rng(seed)
        share = np.full((len(sums), 2, sums.shape[3], 2), np.nan)
        ends = np.full((*share.shape, 2), np.nan)
        for h, arm in np.ndindex(share.shape[:2]):
            base = sums[h, :, arm, 0, 0]
            if base.sum() > 0:
                share[h, arm] = sums[h, :, arm].sum(0) / base.sum()
                for place in np.ndindex(share.shape[2:]):
                    above = sums[(h, slice(None), arm, *place)]
                    ends[(h, arm, *place)] = bootstrap_ratio(np.stack([above, base], 1), rng)
        held, erased = share[..., 0], share[:, :, -1, 1]
        offsets = np.arange(-BEFORE, AFTER + 1)
        return cls(layers, heads, offsets, held, ends[..., 0, :], erased, ends[:, :, -1, 1])

    @property
    def gap(self) -> Float[np.ndarray, " h"]:
        """How much more is erased of the old value than of others; −∞ where that is unknown."""
        return np.nan_to_num(self.erased[:, 0] - self.erased[:, 1], nan=-np.inf)

    @property
    def sure(self) -> Bool[np.ndarray, " h"]:
        """Which heads surely erase more of the old value."""
        return self.erased_interval[:, 0, 0] > self.erased_interval[:, 1, 1]

    @property
    def says(self) -> str:
        """What the head that erases most more of the old value than of others still holds."""
        if np.isneginf(self.gap).all():
            return "No head holds values of both kinds around a rewrite."
        head = int(np.where(self.sure | ~self.sure.any(), self.gap, -np.inf).argmax())
        name = name_head(self.layers[head], self.heads[head])
        old, other = map(percent, self.held[head, :, -1])
        after = f"{AFTER} tokens after its key is written again"
        if not self.sure[head]:
            return (
                "No head surely erases more of an old value than of others when its key is "
                f"written again: {AFTER} tokens later, {name} holds {old} of it and {other} of "
                "other values."
            )
        taken, of_others = map(percent, self.erased[head])
        return (
            f"{name[0].upper()}{name[1:]} holds {old} of an old value {after}, and {other} of "
            f"other values; {taken} of the old value are erased and {of_others} of the others. "
            f"Heads that surely erase more of the old value: {int(self.sure.sum())} of "
            f"{len(self.heads)}."
        )

    def numbers(self) -> Table:
        """Return what is held, erased and decayed after the rewrite, for each head drawn."""
        rows = []
        for head in self._choose():
            for arm, name in enumerate(("old value", "other values")):
                held, erased = self.held[head, arm, -1], self.erased[head, arm]
                parts = map(percent, (held, erased, 1 - held - erased))
                rows.append((name_head(self.layers[head], self.heads[head]), name, *parts))
        return Table(("", f"{AFTER} tokens after", "held", "erased", "decayed"), tuple(rows))

    def figure(self) -> go.Figure:
        """Draw the two shares by tokens since the rewrite, a panel for each head."""
        chosen = self._choose()
        shown = np.concatenate([self.held[chosen].ravel(), self.interval[chosen].ravel()])
        ends = np.nanmin(shown, initial=-0.03), np.nanmax(shown, initial=1.03)
        axis = Axis("still held", "share", ends=(float(ends[0]), float(ends[1])))
        panels = []
        for head in chosen:
            lines = [
                Line(name, self.offsets, self.held[head, arm], self.interval[head, arm])
                for arm, name in enumerate(("value whose key is written again", "other values"))
            ]
            name = name_head(self.layers[head], self.heads[head])
            panels.append(Curves(lines, axis, name, levels={"": 0.0}, height=200))
        return curves(panels, Axis("tokens after rewrite"), across=min(2, len(panels)))

    def _choose(self) -> list[int]:
        """Return the heads that are drawn, in their order."""
        return sorted(np.argsort(-self.gap, kind="stable")[:SHOWN].tolist())


@dataclass(frozen=True)
class Silenced(Finding):
    """What is answered when the latest write of each key neither erases nor writes, or only writes.

    Attributes:
        layers: blocks in which a mixer erases.
        untouched: shares of answers that are right, and that are an earlier value of the key.
        shares: the same with one layer silenced, first by `ARMS`.
        interval: 95 %, over rows.
        placebo: the same where as many earlier writes of the row are silenced, drawn at random.
        placebo_interval: 95 %, over rows.
        answers: how many there are.
    """

    layers: Int[np.ndarray, " n"]
    untouched: Float[np.ndarray, " 2"]
    shares: Float[np.ndarray, "2 n 2"]
    interval: Float[np.ndarray, "2 n 2 2"]
    placebo: Float[np.ndarray, "2 n 2"]
    placebo_interval: Float[np.ndarray, "2 n 2 2"]
    answers: int

    title = "Answers when the latest writes erase nothing"
    reading = (
        "In one layer at a time, the latest write of each key is silenced, from its key to the "
        "position that holds its value: β = 0, so that it neither writes nor erases, or it writes "
        "as before, but takes nothing away. An answer is stale if it is an earlier value of the "
        "key. Crosses are placebos: as many earlier writes of the row, drawn at random, are "
        "silenced instead. Bars are 95 % intervals over rows; dotted lines are answers without "
        "any change."
    )

    def _find_most(self, arm: int) -> tuple[int, bool]:
        """Return the layer whose silence makes most answers stale, and whether surely more."""
        sure = self.interval[arm, :, 1, 0] > self.placebo_interval[arm, :, 1, 1]
        stale = np.where(sure | ~sure.any(), self.shares[arm, :, 1], -np.inf)
        return int(stale.argmax()), bool(sure.any())

    def _describe(self, arm: int) -> str:
        layer, sure = self._find_most(arm)
        if not sure:
            return "in no layer surely more than its placebo"
        stale, placebo = self.shares[arm, layer, 1], self.placebo[arm, layer, 1]
        return f"{percent(stale)} in layer {self.layers[layer]} (placebo {percent(placebo)})"

    @property
    def says(self) -> str:
        """How many answers become stale without the latest write, and without its erasing."""
        return (
            f"{percent(self.untouched[1])} of the answers are an earlier value of their key. If "
            f"the latest writes neither write nor erase, they are {self._describe(0)}; if they "
            f"only erase nothing, {self._describe(1)}."
        )

    def numbers(self) -> Table:
        """Return the shares in the layer whose silence makes most answers stale."""
        rows: list[tuple[str, ...]] = [("untouched", "", *map(percent, self.untouched), "", "")]
        for arm, name in enumerate(ARMS.values()):
            layer, _ = self._find_most(arm)
            parts = (*self.shares[arm, layer], *self.placebo[arm, layer])
            rows.append((name, str(self.layers[layer]), *map(percent, parts)))
        columns = "latest writes", "layer", "right", "stale", "placebo right", "placebo stale"
        return Table(columns, tuple(rows))

    def figure(self) -> go.Figure:
        """Draw the shares of right and of stale answers, a line for each layer."""
        panels = []
        for kind, title in enumerate(("right answers", "stale answers")):
            dots = []
            for arm, name in enumerate(ARMS.values()):
                shares, ends = self.shares[arm, :, kind], self.interval[arm, :, kind]
                placebo, around = self.placebo[arm, :, kind], self.placebo_interval[arm, :, kind]
                dots += [Dots(name, shares, ends), Dots("placebo", placebo, around, "placebo")]
            levels = {"untouched": float(self.untouched[kind])}
            axis = Axis(unit="share", ends=(-0.12, 1.12), ticks={0: "0%", 0.5: "50%", 1: "100%"})
            panels.append(Pairs(dots, axis, title, levels))
        return pairs([f"layer {layer}" for layer in self.layers], panels)


def silence(
    subject: Subject,
    batch: Batch,
    writes: Sequence[Writes],
    offsets: Offsets,
    layers: Sequence[int],
) -> Silenced:
    """Silence the latest write of each key that was written before, or as many others, by layer.

    Args:
        writes: of each row of the batch; some key is written again.
        layers: blocks whose mixer erases.
    """
    rng, layers = np.random.default_rng(subject.seed), thin(layers, LAYERS)
    latest = [of.rewrite for of in writes]
    drawn = [
        _draw(of.again, int(chosen.sum()), rng) for of, chosen in zip(writes, latest, strict=True)
    ]

    def answer() -> tuple[Float[np.ndarray, " 2"], Float[np.ndarray, "2 2"]]:
        given = compute_answers(scored(subject.model, batch), batch.links["query_pos"])
        sums = _count_answers(given, batch, writes)
        ends = [bootstrap_ratio(sums[:, [kind, 2]], rng) for kind in range(2)]
        return sums[:, :2].sum(0) / sums[:, 2].sum(), np.array(ends)

    untouched, _ = answer()
    found = np.empty((2, len(ARMS), len(layers), 2))
    ends = np.empty((*found.shape, 2))
    for i, layer in enumerate(layers):
        for arm, hook in enumerate(ARMS):
            for placebo, chosen in enumerate((latest, drawn)):
                rows, positions = _list_places(writes, chosen, offsets.get(layer)[0])
                inside = positions < batch.inputs.shape[1]
                name = f"blocks.{layer}.mixer.{hook}"
                place = rows[inside], positions[inside]
                with ablate(subject.model, name, "zero", rows=place[0], positions=place[1]):
                    found[placebo, arm, i], ends[placebo, arm, i] = answer()
    return Silenced(
        layers=np.array(layers),
        untouched=untouched,
        shares=found[0],
        interval=ends[0],
        placebo=found[1],
        placebo_interval=ends[1],
        answers=sum(int(chosen.sum()) for chosen in latest),
    )


def _draw(free: Bool[Tensor, " w"], many: int, rng: np.random.Generator) -> Bool[Tensor, " w"]:
    """Draw so many of the writes that are free."""
    chosen = rng.permutation(free.nonzero()[:, 0].cpu().numpy())[:many]
    return torch.zeros_like(free).index_fill(0, torch.from_numpy(chosen).to(free.device), True)


def _list_places(
    writes: Sequence[Writes], chosen: Sequence[Bool[Tensor, " w"]], read: int
) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """Return row and position of all tokens of the chosen writes, from key to where it is read."""
    places = [
        (row, position)
        for row, (of, some) in enumerate(zip(writes, chosen, strict=True))
        for first, last in zip(of.key[some].tolist(), of.value[some].tolist(), strict=True)
        for position in range(first, last + read + 1)
    ]
    rows, positions = torch.tensor(places).reshape(-1, 2).unbind(1)
    return rows, positions


def _count_answers(
    answers: Int[Tensor, "b q"], batch: Batch, writes: Sequence[Writes]
) -> Float[np.ndarray, "b 3"]:
    """Count in each row the answers for rewritten keys: right ones, stale ones, and all."""
    counts = []
    for row, of in enumerate(writes):
        query, answer = batch.links["query_pos"][row], answers[row]
        earlier = of.again & (of.query == query[:, None])  # [q w]
        asked = (query >= 0) & earlier.any(1)
        right = asked & (answer == batch.targets[row, query.clamp(min=0)])
        stale = (earlier & (batch.inputs[row, of.value] == answer[:, None])).any(1) & ~right
        counts.append([int(kind.sum()) for kind in (right, stale & asked, asked)])
    return np.array(counts, np.float64)

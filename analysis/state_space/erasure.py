"""What is written to a state, what is kept, and which token erases which?

What a state holds of the write of token s is κ_s v_sᵀ. At first κ_s is k_s. Each later token t lets
it decay, then takes away what it reads of it at m_t:

    κ_s ← (I − e_t m_tᵀ) diag(exp g_t) κ_s        (letters as in lab.ops.delta)

The state is the sum of all κ_s v_sᵀ, so every change of it belongs to one write and one token.
Shares of a write are taken at its own key, k_sᵀκ_s / ‖k_s‖², at first 1, so that for each write

    held + Σ let decay by a token + Σ erased by a token = 1,  exactly.

Shares can be negative or above 1 (β > 1 turns over what is held). Means over writes have the
weights ‖k_s v_sᵀ‖². Where a token writes several times, its share is such a mean over its writes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import plotly.graph_objects as go
import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from analysis.base import Finding, NotApplicableError, Subject, Table, thin
from analysis.figures import Axis, Dots, Pairs, draw_heads
from analysis.figures.picture import (
    Heatmap,
    choose_pool,
    draw_heatmap,
    make_picture,
    pool_matrix,
)
from analysis.links import find_offsets
from analysis.plain import figure_only
from analysis.state_space.recurrence import (
    StateRecurrence,
    choose_rows,
    collect_recurrences,
    index_heads,
)
from analysis.state_space.rewrites import Held, Silenced, find_writes, silence, sum_held
from analysis.words import format_digits, name_head, percent
from lab.layers.recurrence import Recurrence, Terms
from tasks.base import Batch

__all__ = ["TITLE", "Traced", "follow", "measure", "name_writes", "trace"]

TITLE = "What is written, kept and erased"
ENTRIES = 2**23
"""Pairs of tokens, of all heads and rows, between which writes are followed."""
PICTURED = 4
"""Maximum number of layers whose erasures are drawn; of more, evenly spaced ones."""
QUANTITIES = ("written", "decayed", "erased", "overlap", "strength")
ERASES = 0.01
"""A head erases if at some role's tokens it takes away more than this share of the state's size."""
LEAST = torch.finfo(torch.float32).tiny


def follow(
    terms: Terms, values: Float[Tensor, "b t *r h c"], *, match_before_decay: bool
) -> Iterator[tuple[Float[Tensor, "b h c n"], Float[Tensor, "b h c n"], Float[Tensor, "b h c n"]]]:
    """Yield the state after each token, transposed, and what the token let decay and erased of it.

    With `name_writes` as values these are κ of every write, 0 for those to come.
    """
    keys, match, erase, given = (
        None if z is None else rearrange(z, "b t ... h n -> b t (...) h 1 n")
        for z in (terms.k, terms.match, terms.k if terms.erase is None else terms.erase, values)
    )
    assert keys is not None
    assert erase is not None
    assert given is not None
    b, t, r, h, _, n = keys.shape
    held = keys.new_zeros(b, h, values.shape[-1], n)
    for token in range(t):
        before, erased = held, torch.zeros_like(held)
        if terms.log_decay is not None:
            held = held * terms.log_decay[:, token].exp().reshape(b, h, 1, -1)
        decayed = before - held
        for write in range(r):
            if match is not None:
                # Only the first write of a token finds a state that has yet to decay.
                source = before if match_before_decay and write == 0 else held
                found = (source * match[:, token, write]).sum(-1, keepdim=True)
                taken = found * erase[:, token, write]
                held, erased = held - taken, erased + taken
            held = held + given[:, token, write].mT * keys[:, token, write]
        yield held, decayed, erased


def name_writes(terms: Terms) -> Float[Tensor, "b t *r h w"]:
    """Return values by which the state keeps every write apart: an axis for each."""
    sizes = terms.k.shape[1:-2]
    own = torch.eye(math.prod(sizes), dtype=terms.k.dtype, device=terms.k.device)
    own = own.view(1, *sizes, 1, len(own))
    return own.expand(len(terms.k), *sizes, terms.v.shape[-2], -1)


@dataclass(frozen=True)
class Traced:
    """What becomes of the writes of some rows, and what each token does to the state.

    Attributes:
        held: the share of write s that is left after token t; 0 before it is written.
        erased: the share of write s that token t takes away.
        weight: ‖k_s v_sᵀ‖².
        tokens: of each token the sizes of what it writes, lets decay and erases; the share of the
            state's size that lies at its key, ‖Sᵀm‖ / ‖S‖ ‖m‖, before it erases; and m·e, the share
            of what lies there that it takes away. All as in `QUANTITIES`.
        size: ‖S‖ before each token.
    """

    held: Float[Tensor, "b h t s"]
    erased: Float[Tensor, "b h t s"]
    weight: Float[Tensor, "b h s"]
    tokens: Float[Tensor, "q b t h"]
    size: Float[Tensor, "b t h"]


def trace(layer: StateRecurrence) -> Traced:
    """Follow the writes of a layer."""
    terms, module = layer.terms, layer.mixer.module
    before_decay = isinstance(module, Recurrence) and module.match_before_decay
    keys, values = (rearrange(z, "b t ... h n -> b h (t ...) n") for z in (terms.k, terms.v))
    squares = keys.square().sum(-1)
    weight = squares * values.square().sum(-1)
    unit = keys / squares.clamp(min=LEAST)[..., None]
    at, of = (terms.k if z is None else z for z in (terms.match, terms.erase))
    at, of = (rearrange(z, "b t ... h n -> b t (...) h n") for z in (at, of))
    directions = at / at.norm(dim=-1, keepdim=True).clamp(min=LEAST)
    n_tokens = terms.q.shape[1]
    by_token = weight.unflatten(-1, (n_tokens, -1)).sum(-1)

    def take_share(found: Tensor) -> Tensor:
        """Return the share of each token's write that a part of every κ is."""
        sums = ((found * unit).sum(-1) * weight).unflatten(-1, (n_tokens, -1)).sum(-1)
        return sums / by_token.clamp(min=LEAST)

    held, erased, sizes = [], [], []
    # The state itself, too: a column for each write, then one for each channel of the values.
    joined, many = torch.cat([name_writes(terms), terms.v], -1), keys.shape[2]
    state = values.new_zeros(*values[:, :, 0].shape, keys.shape[-1])
    for token, found in enumerate(follow(terms, joined, match_before_decay=before_decay)):
        held.append(take_share(found[0][:, :, :many]))
        erased.append(take_share(found[2][:, :, :many]))
        after, lost, taken = (part[:, :, many:] for part in found)
        read = state if before_decay else state - lost
        overlap = torch.einsum("brhn,bhpn->brhp", directions[:, token], read).norm(dim=-1).mean(1)
        overlap = overlap / _measure_size(read).clamp(min=LEAST)
        sizes.append(torch.stack([*map(_measure_size, (state, lost, taken)), overlap]))
        state = after
    size, lost, taken, overlap = torch.stack(sizes, 2)
    strength = (at * of).sum(-1).mean(2)
    if terms.match is None:
        strength = torch.zeros_like(strength)
    tokens = torch.stack([layer.writes, lost, taken, overlap, strength])
    return Traced(torch.stack(held, 2), torch.stack(erased, 2), by_token, tokens, size)


def _measure_size(state: Float[Tensor, "b h p n"]) -> Float[Tensor, "b h"]:
    return state.flatten(2).norm(dim=-1)


@torch.no_grad()
def measure(subject: Subject) -> "list[Turnover | Erasures | Held | Silenced]":
    """Return what is written and erased by role and token, and what becomes of old values.

    Raises:
        NotApplicableError: for a model without a layer that holds a matrix as state, or one in
            which no layer erases, unless the task writes keys again.
    """
    batch = choose_rows(subject, ENTRIES)
    found, writes = collect_recurrences(subject.model, batch), find_writes(batch)
    erasing = [layer for layer in found if layer.terms.match is not None]
    if not erasing and not writes:
        raise NotApplicableError(
            "no mixer takes away what its state holds, and no key is rewritten"
        )
    offsets = find_offsets(subject)
    pictured = [layer.mixer.layer for layer in thin(erasing, PICTURED)] if erasing else []
    means, pictures, sums = [], [], []
    for layer in found:
        traced, number = trace(layer), layer.mixer.layer
        means.append(average_by_role(traced, batch.roles, len(subject.task.role_names)))
        if number in pictured:
            pictures.append(picture_erasures(layer, traced, subject, batch, offsets.get(number)[0]))
        if writes:
            sums.append(
                sum_held(traced.held, traced.erased, traced.weight, writes, offsets.get(number)[0])
            )
    findings: list[Turnover | Erasures | Held | Silenced] = []
    if writes:
        findings.append(Held.of(*index_heads(found), np.concatenate(sums), subject.seed))
    if erasing:
        present = [
            role for role in range(len(subject.task.role_names)) if (batch.roles == role).any()
        ]
        names = tuple(subject.task.role_names[role] for role in present)
        joined = np.concatenate(means, -1)[:, present]
        findings.append(Turnover(*index_heads(found), names, joined))
    if writes and erasing:
        numbers = [layer.mixer.layer for layer in erasing]
        findings.append(silence(subject, batch, writes, offsets, numbers))
    return [*findings, *pictures]


def average_by_role(
    traced: Traced, roles: Int[Tensor, "b t"], n_roles: int
) -> Float[np.ndarray, "q r h"]:
    """Return the means of a layer's `QUANTITIES` over the tokens of each role; NaN without any.

    Sizes are divided by the mean size of the state.
    """
    means = [traced.tokens[:, roles == role].mean(1) for role in range(n_roles)]
    joined = torch.stack(means, 1).double()
    joined[:3] /= traced.size.double().mean((0, 1)).clamp(min=LEAST)
    return joined.cpu().numpy()


@dataclass(frozen=True)
class Turnover(Finding):
    """What each head writes and erases at each kind of token: means over the tokens of a role.

    Attributes:
        layers: the block of each head.
        heads: its index in the block.
        role_names: the roles that occur on these rows.
        means: of `QUANTITIES`, by role and head: what is written, decays and is erased, as shares
            of the state's mean size ‖S‖; the overlap of the key with what the state holds; and
            how much of what it holds there is taken away, m·e, which is β in delta rules.
    """

    layers: Int[np.ndarray, " h"]
    heads: Int[np.ndarray, " h"]
    role_names: tuple[str, ...]
    means: Float[np.ndarray, "q r h"]

    title = "What is written and erased at each kind of token"
    reading = (
        "Means over the tokens of each role: ‖k v‖, what is written, and ‖e Sᵀm‖, what is taken "
        "away, as shares of the state's mean size ‖S‖; overlap, the share ‖Sᵀm‖ / ‖S‖ ‖m‖ of the "
        "state that lies at the token's key; and β, the share of what lies there that is taken "
        "away (m·e; 0 where a mixer takes nothing away). Of more than 24 heads, those of a layer "
        "share a line. The table has the head that erases most."
    )

    @property
    def most(self) -> tuple[int, int]:
        """The role and the head of which most is erased."""
        erased = np.nan_to_num(self.means[QUANTITIES.index("erased")])
        role, head = np.unravel_index(int(erased.argmax()), erased.shape)
        return int(role), int(head)

    @property
    def says(self) -> str:
        """How many heads erase, and where most is erased."""
        erased = self.means[QUANTITIES.index("erased")]
        count = int((np.nan_to_num(erased).max(0) > ERASES).sum())
        opening = f"Heads that erase: {count} of {len(self.heads)}"
        if not count:
            return f"{opening}: what is written stays until it decays."
        role, head = self.most
        name = name_head(self.layers[head], self.heads[head])
        _, _, taken, overlap, strength = self.means[:, role, head]
        overlap = percent(overlap)
        return (
            f"{opening}; {name} erases most: a {self.role_names[role]} token takes away "
            f"{percent(taken)} of the state's mean size, with β {format_digits(strength)} and an "
            f"overlap of {overlap} between its key and the state."
        )

    def numbers(self) -> Table:
        """Return the means of the head that erases most."""
        _, head = self.most
        name = name_head(self.layers[head], self.heads[head])
        rows = tuple(
            (role, *map(percent, of[:4]), format_digits(of[4]))
            for role, of in zip(self.role_names, self.means[:, :, head].T, strict=True)
        )
        return Table((name, *QUANTITIES[:4], "β"), rows)

    def figure(self) -> go.Figure:
        """Draw four quantities by role as dots, one line per head."""
        titles = {
            "written": "written,\nof ‖S‖",
            "erased": "erased,\nof ‖S‖",
            "overlap": "overlap of\nkey and S",
            "strength": "β",
        }
        panels = []
        for quantity, title in titles.items():
            means = self.means[QUANTITIES.index(quantity)]
            dots = [Dots(*role) for role in zip(self.role_names, means, strict=True)]
            top = float(np.nanmax(means, initial=0.01))
            digit = 10.0 ** np.floor(np.log10(top))
            mark = float(np.floor(top / digit) * digit)  # one label fits on a phone
            label = f"{mark:g}" if quantity == "strength" else f"{100 * mark:g}%"
            unit = "number" if quantity == "strength" else "share"
            axis = Axis(unit=unit, ends=(-0.05 * top, 1.1 * top), ticks={0: "0", mark: label})
            panels.append(Pairs(dots, axis, title))
        return draw_heads(self.layers, self.heads, panels)


@dataclass(frozen=True)
class Erasures(Finding):
    """Which token of the first row erases which, and what becomes of writes by role.

    Attributes:
        role_names: the roles that occur on these rows.
        written: the share of all that each head wrote, Σ ‖k v‖², that tokens of each role did.
        left: share of what tokens of a role wrote that is left at the end of the row.
        decayed: share of it that decayed.
        erased: share of it that later tokens of each role erased, first the role that erases.
        largest: the largest share that one token erases of another's write on the first row.
    """

    title: str
    layer: int
    role_names: tuple[str, ...]
    written: Float[np.ndarray, "h r"]
    left: Float[np.ndarray, "h r"]
    decayed: Float[np.ndarray, "h r"]
    erased: Float[np.ndarray, "r h r"]
    largest: float
    shown: Heatmap = figure_only()

    reading = (
        "Each cell is the share of what a source token wrote that a later target token takes "
        "away, at the write's own key; negative shares add to it. A row is one token's erasures, a "
        "column what becomes of one write. Colours end at the 99.5 % quantile of sizes. Ticks mark "
        "query rows, rings where a query meets the value it asks for. The table follows all that "
        "the head that erases most wrote, on all rows, to the end of its row: what is left, has "
        "decayed, and is erased by tokens of each role adds up to 100 %, exactly."
    )

    @property
    def total(self) -> Float[np.ndarray, " h"]:
        """The share of all that each head wrote that later tokens erased."""
        return (self.erased.sum(0) * self.written).sum(-1)

    @property
    def says(self) -> str:
        """What becomes of what the head that erases most has written."""
        head = int(self.total.argmax())
        left, decayed = (
            (part[head] * self.written[head]).sum() for part in (self.left, self.decayed)
        )
        by_role = (self.erased[:, head] * self.written[head]).sum(-1)
        name = name_head(self.layer, head)
        if self.largest <= ERASES:
            return "No token of this layer erases what another has written."
        eraser = self.role_names[int(by_role.argmax())]
        return (
            f"Of all that {name} writes, later tokens erase {percent(self.total[head])}, "
            f"{eraser} tokens most; {percent(decayed)} decays, and {percent(left)} is left at the "
            f"end of a row. On the first row one token erases up to {percent(self.largest)} of "
            "another's write."
        )

    def numbers(self) -> Table:
        """Return what becomes of the writes of each role, for the head that erases most."""
        head = int(self.total.argmax())
        rows = tuple(
            (
                role,
                *(percent(part[head, i]) for part in (self.written, self.left, self.decayed)),
                *(percent(part[head, i]) for part in self.erased),
            )
            for i, role in enumerate(self.role_names)
        )
        erasers = (f"by {role}" for role in self.role_names)
        first = f"{name_head(self.layer, head)} wrote at"
        return Table((first, "of all", "left", "decayed", *erasers), rows)

    def figure(self) -> go.Figure:
        """Draw a heat map of who erases whom per head."""
        fig = draw_heatmap(self.shown, self.layer)
        fig.update_traces(
            hovertemplate="token %{y} erases of token %{x}: %{z:.1%}<extra></extra>",
            selector={"type": "heatmap"},
        )
        fig.update_xaxes(
            title_text="token that wrote", selector={"title.text": "source position, tokens"}
        )
        fig.update_yaxes(
            title_text="token that erases", selector={"title.text": "target position, tokens"}
        )
        return fig.update_layout(coloraxis_colorbar_tickformat=".0%")


def picture_erasures(
    layer: StateRecurrence, traced: Traced, subject: Subject, batch: Batch, read: int
) -> Erasures:
    """Return who erases whom in a layer: by role on all rows, by token on the first.

    Args:
        read: how far after a value the layer holds it.
    """
    roles = batch.roles
    present = [role for role in range(len(subject.task.role_names)) if (roles == role).any()]
    is_role = torch.stack([roles == role for role in present]).to(traced.weight)  # [r b t]
    written = torch.einsum("bhs,rbs->hr", traced.weight, is_role)
    spent = written.clamp(min=LEAST)

    def sum_up(share: Float[Tensor, "b h s"]) -> Float[np.ndarray, "h r"]:
        sums = torch.einsum("bhs,bhs,rbs->hr", share, traced.weight, is_role)
        return (sums / spent).double().cpu().numpy()

    erased = [sum_up(torch.einsum("bhts,bt->bhs", traced.erased, of_role)) for of_role in is_role]
    left = sum_up(traced.held[:, :, -1])
    first, pool = traced.erased[0], choose_pool(layer.n_heads, roles.shape[1])
    later = np.where(
        np.tri(roles.shape[1], k=-1, dtype=bool), first.cpu().numpy(), np.float32(np.nan)
    )
    largest = float(np.nanmax(later, initial=0.0))
    shown = Heatmap.of(subject, make_picture(pool_matrix(later, pool), pool))
    kind, pooled = layer.mixer.kind, f", max over {pool} × {pool}" if pool > 1 else ""
    return Erasures(
        title=f"Layer {layer.mixer.layer} · {kind} · who erases whom, first test row{pooled}",
        layer=layer.mixer.layer,
        role_names=tuple(subject.task.role_names[role] for role in present),
        written=(written / written.sum(-1, keepdim=True).clamp(min=LEAST)).double().cpu().numpy(),
        left=left,
        decayed=1 - left - np.sum(erased, 0),
        erased=np.stack(erased),
        largest=largest,
        shown=replace(shown, links=replace(shown.links, read=read)),
    )

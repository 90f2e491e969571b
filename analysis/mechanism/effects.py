"""What interventions on couples do to the answer, as a share of what exchanging two keys does.

restore             the clean residual stream at some positions, after each block
measure_components  the clean output of one mixer or state transform at some positions
edit                edges of a mixer's matrix blocked, or its values exchanged
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from analysis.base import Finding, Table, thin
from analysis.figures import Axis, Colors, Dots, Map, Pairs, heat, pairs
from analysis.interventions import block_edges, patch, swap_values
from analysis.links import IN_PLACE, Offsets
from analysis.mechanism.couples import (
    Baseline,
    Couples,
    compute_answers,
    compute_margins,
    estimate_share,
)
from analysis.scoring import scored
from analysis.words import name_place, percent
from lab.hooks import HookPoint
from lab.layers.mixer import MatrixMixer
from lab.models import LanguageModel

SITES = ("key", "value", "query", "elsewhere", "placebo")
"""Where the residual stream is restored."""
COMPONENT_SITES = ("key", "value", "query", "placebo")
"""Where a component's output is restored."""
SITE_NAMES = dict(zip(SITES, ("keys", "values", "queries", "all else", "placebo"), strict=True))
POINTS = {"mixer": "hook_attn_out", "transform": "hook_mlp_out"}
"""Hook points of what each component of a block adds to the residual stream."""
ARMS = ("query → value", "value → key", "values exchanged")
"""The edits: two kinds of edges to block, and an exchange of values."""
DEPTHS = 9
"""Maximum number of depths at which to restore the residual stream, evenly spread."""
LAYERS = 12
"""Maximum number of layers whose components are restored; deeper models get evenly spread ones."""
BLOCK_TOKENS = 2**19
"""Maximum number of tokens in all forward passes, times blocks; it limits the rows."""
MATRIX_ENTRIES = 2**26
"""Maximum number of matrix entries to edit in all: they grow with the square of the row length."""
FEWEST_ROWS = 4
CARRIES = 1 / 3
"""A component carries the answer if it surely restores more than this share."""
MOST = 6
"""Maximum number of components in the table."""


@dataclass(frozen=True)
class Restored:
    """The share of the answer that returns when the clean residual stream is patched in.

    The residual stream of the clean rows replaces that of the corrupt rows at some positions:

        share = Σ (patched − corrupt) / Σ (clean − corrupt)  of the margin, over queries

    The margin is logit(right answer of the clean row) − logit(that of the corrupt row). At 0 the
    answer is still the corrupt row's; at 1 it is the clean row's again.

    Sites: the couples' key, value or query positions; "elsewhere" is all other positions,
    "placebo" as many random ones of them as there are values.

    Attributes:
        depths: blocks that the residual stream has passed, 0 … L [k]. The shares at both ends
            hold by construction: at 0 only the key tokens differ, and at L only the query's own
            residual stream is read.
        share: one row per site, in the order of `SITES`.
    """

    depths: Int[np.ndarray, " k"]
    share: Float[np.ndarray, "5 k"]
    interval: Float[np.ndarray, "5 k 2"]
    queries: int


def restore(model: LanguageModel, known: Baseline, rng: np.random.Generator) -> Restored:
    """Restore the clean residual stream at each depth and site, one at a time."""
    n_layers = len(model.blocks)
    inner = thin(range(1, n_layers), DEPTHS)
    names = [f"blocks.{depth}.hook_resid_pre" for depth in inner]
    share, interval = _restore_each(model, known, names, SITES, rng)
    begin, end = np.zeros((2, len(SITES), 1))
    begin[SITES.index("key")] = end[SITES.index("query")] = 1
    ends = [np.repeat(one[:, :, None], 2, 2) for one in (begin, end)]
    return Restored(
        depths=np.array([0, *inner, n_layers]),
        share=np.concatenate([begin, share, end], 1),
        interval=np.concatenate([ends[0], interval, ends[1]], 1),
        queries=2 * int(known.pairs.valid.sum()),
    )


def _restore_each(
    model: LanguageModel,
    known: Baseline,
    names: Sequence[str],
    sites: Sequence[str],
    rng: np.random.Generator,
) -> tuple[Float[np.ndarray, "s n"], Float[np.ndarray, "s n 2"]]:
    """Restore what passes each hook point at each site, one at a time: shares and intervals."""
    pairs, clean = known.pairs, {}

    def keep(tensor: Tensor, point: HookPoint) -> None:
        clean[point.name] = tensor

    with model.hooks([(list(names), keep)]):
        scored(model, pairs.clean)
    places = locate_sites(pairs, rng)
    share, interval = np.zeros((len(sites), len(names))), np.zeros((len(sites), len(names), 2))
    for i, name in enumerate(names):
        for j, site in enumerate(sites):
            rows, positions = places[site].nonzero(as_tuple=True)
            with patch(model, name, clean[name], rows=rows, positions=positions):
                margins = compute_margins(scored(model, pairs.corrupt), pairs)
            share[j, i], interval[j, i] = estimate_share(known.sum_changes(margins), rng)
    return share, interval


def locate_sites(pairs: Couples, rng: np.random.Generator) -> dict[str, Bool[Tensor, "b t"]]:
    """Return a mask of the positions of each site; draws the placebo's."""
    none = torch.zeros_like(pairs.clean.inputs, dtype=torch.bool)
    sites = {
        site: none.scatter(1, positions.flatten(1), True)
        for site, positions in zip(SITES, (pairs.key, pairs.value, pairs.query), strict=False)
    }
    sites["elsewhere"] = ~(sites["key"] | sites["value"] | sites["query"])
    before = torch.arange(none.shape[1], device=none.device) < pairs.query.amax((1, 2))[:, None]
    chosen_at = _draw_positions(sites["elsewhere"] & before, pairs.value[0].numel(), rng)
    # Positions that could not be drawn are −1 and land in an extra column, cut off here.
    wide = torch.zeros(none.shape[0], none.shape[1] + 1, dtype=torch.bool, device=none.device)
    sites["placebo"] = wide.scatter(1, chosen_at % wide.shape[1], True)[:, :-1]
    return sites


@dataclass(frozen=True)
class Components(Finding):
    """The share of the answer that returns when one component's clean output is patched in.

    One component's output in the clean rows replaces its output in the corrupt rows at some
    positions:

        share = Σ (patched − corrupt) / Σ (clean − corrupt)  of the margin, over queries

    as in `effects.Restored`, with the sites of `COMPONENT_SITES`. Everything else in the residual
    stream stays the corrupt row's, so the shares of several components may add up.

    Attributes:
        layers: block of each component [n].
        components: "mixer" or "transform" for each component, n in all.
        share: one row per component, one column per site.
        offsets: how far after a value its key is gathered, where a convolution reads there.
    """

    layers: Int[np.ndarray, " n"]
    components: tuple[str, ...]
    share: Float[np.ndarray, "n 4"]
    interval: Float[np.ndarray, "n 4 2"]
    rows: int
    offsets: Offsets = IN_PLACE

    title = "Which component carries the answer"
    reading = (
        "Corrupt rows are clean rows in which pairs exchanged keys. In each cell, what one mixer "
        "or state transform adds to the residual stream at one kind of position is replaced by "
        "what it adds in the clean row. At 0 the answer stays the corrupt row's; at 1 it is the "
        "clean row's again. Bold: the 95 % interval over rows excludes 0. Placebo: as many random "
        "other positions. If components work in a chain, each link appears here by itself."
    )

    @property
    def says(self) -> str:
        """How many places of components surely carry the answer, and the one that carries most."""
        carriers = find_carriers(self)
        shares = np.nan_to_num(self.share[:, :-1], nan=-np.inf)
        n, s = [*carriers, divmod(int(shares.argmax()), shares.shape[1])][0]
        share, ends, placebo = self.share[n, s], self.interval[n, s], self.share[n, -1]
        return (
            "Pairs of a component and a kind of position that surely restore more than a third of "
            f"the answer, tried one at a time: {len(carriers)} of {shares.size}; most is restored "
            f"by {self._name(n, s)}, {format_share(share)} (95 % interval {format_ends(ends)}; "
            f"placebo {format_share(placebo)})."
        )

    def numbers(self) -> Table | None:
        """Return the components that surely carry the answer, the largest share first."""
        rows = []
        for n, s in find_carriers(self)[:MOST]:
            share, placebo = format_share(self.share[n, s]), format_share(self.share[n, -1])
            rows.append((self._name(n, s), share, format_ends(self.interval[n, s]), placebo))
        columns = "restored by", "share", f"95 % interval, {self.rows} rows", "placebo"
        return Table(columns, tuple(rows)) if rows else None

    def _name(self, n: int, s: int) -> str:
        """Name a component and a kind of position."""
        site = SITE_NAMES[COMPONENT_SITES[s]]
        place = name_place(self.offsets.gathered if site == "values" else 0, f"the {site}")
        return f"layer {self.layers[n]}'s {self.components[n]} at {place}"

    def figure(self) -> go.Figure:
        """Draw the restored shares as colours, and as numbers."""
        names = [f"{i} · {kind}" for i, kind in zip(self.layers, self.components, strict=True)]
        low, high = self.interval[..., 0], self.interval[..., 1]
        texts = np.vectorize(format_share, otypes=[object])(self.share)
        texts = np.where((low > 0) | (high < 0), "<b>" + texts + "</b>", texts)
        columns = [SITE_NAMES[site] for site in COMPONENT_SITES]
        shown = Map(self.share, names, columns, texts=texts.tolist())
        colors = Colors("answer restored, share of the margin", ends=(-1, 1))
        return heat([shown], colors, Axis(), Axis("layer"))


def measure_components(
    model: LanguageModel,
    known: Baseline,
    rng: np.random.Generator,
    offsets: Offsets = IN_PLACE,
) -> Components:
    """Restore each component's output at each site, one at a time."""
    found = [
        (layer, kind)
        for layer, block in thin(list(enumerate(model.list_blocks())), LAYERS)
        for kind, part in (("mixer", block.mixer), ("transform", block.mlp))
        if part is not None
    ]
    n_layers, seq_len = len(model.blocks), known.pairs.clean.inputs.shape[1]
    passes = len(found) * len(COMPONENT_SITES) + 2
    known = known[: max(FEWEST_ROWS, BLOCK_TOKENS // (passes * n_layers * seq_len))]
    names = [f"blocks.{layer}.{POINTS[kind]}" for layer, kind in found]
    share, interval = _restore_each(model, known, names, COMPONENT_SITES, rng)
    return Components(
        layers=np.array([layer for layer, _ in found]),
        components=tuple(kind for _, kind in found),
        share=share.T,
        interval=interval.swapaxes(0, 1),
        rows=len(known.clean),
        offsets=offsets,
    )


def find_carriers(found: Components) -> list[tuple[int, int]]:
    """Return each (component, site) that surely carries more than a third, largest share first.

    Surely means that the low end of its interval is above both a third and the high end of the
    interval of the same component's placebo.
    """
    low, placebo = found.interval[:, :-1, 0], found.interval[:, -1:, 1]
    sure = (low > CARRIES) & (low > placebo)
    order = np.argsort(-np.nan_to_num(found.share[:, :-1], nan=-np.inf), axis=None)
    pairs = zip(*np.unravel_index(order, sure.shape), strict=True)
    return [(int(n), int(s)) for n, s in pairs if sure[n, s]]


@dataclass(frozen=True)
class Edited(Finding):
    """What is left of the margin on the clean rows after an edit of one layer's mixer.

        left = Σ (edited − corrupt) / Σ (clean − corrupt)  of the margin, over queries

    At 1 the edit has no effect; at ½ the model cannot tell the two values apart; at 0 it answers
    the other value.

    Arms: block the edges from the couples' queries to their values; block those from the values to
    their keys; exchange the two values of a couple. Placebos: block an edge to a random earlier
    position that is neither key nor value of the couple; exchange two random positions that belong
    to no couple.

    Attributes:
        layers: blocks whose mixer has a matrix [n].
        left: one row per arm, in the order of `ARMS`.
        followed: share of answers that become the other value when the two are exchanged [n].
        placebo_followed: likewise, when two random positions are exchanged.
        offsets: how far after a value it is blocked or exchanged, where a convolution moved it.
    """

    layers: Int[np.ndarray, " n"]
    left: Float[np.ndarray, "3 n"]
    interval: Float[np.ndarray, "3 n 2"]
    placebo: Float[np.ndarray, "3 n"]
    placebo_interval: Float[np.ndarray, "3 n 2"]
    followed: Float[np.ndarray, " n"]
    placebo_followed: Float[np.ndarray, " n"]
    rows: int
    offsets: Offsets = IN_PLACE

    title = "What is left of recall when a mixer is edited"
    reading = (
        "At 1 the edit has no effect; at ½ the model cannot tell the two values apart; at 0 it "
        "answers the other value. Crosses are placebos: an edge to a random earlier position, or "
        "two exchanged positions that belong to no pair. Bars are 95 % intervals over rows."
    )

    @property
    def says(self) -> str:
        """In which layer each edit surely leaves less of the margin than its placebo."""
        read, written, exchanged = map(self._name_layer, range(3))
        i = int(self.followed.argmax())
        moved, placebo = percent(self.followed[i]), percent(self.placebo_followed[i])
        return (
            "Edits that surely leave less of the answer than their placebo: query → value blocked "
            f"in {read}, value → key blocked in {written}, two values exchanged in {exchanged}; "
            f"exchanging them in layer {self.layers[i]} turns {moved} of the answers into the "
            f"other value (placebo {placebo})."
        )

    def numbers(self) -> Table:
        """Return what each edit leaves in the layer where it leaves least."""
        rows = []
        for arm, name in enumerate(ARMS):
            i, _ = self._find_least(arm)
            offset = self.offsets.get(int(self.layers[i]))[int(arm == 1)]
            edge = name.replace("value", name_place(offset, "the value"), 1) if offset else name
            left, placebo = format_share(self.left[arm, i]), format_share(self.placebo[arm, i])
            ends = format_ends(self.interval[arm, i])
            rows.append((edge, str(self.layers[i]), left, ends, placebo))
        ends = f"95 % interval, {self.rows} rows"
        return Table(("edit", "layer", "left", ends, "placebo"), tuple(rows))

    def _find_least(self, arm: int) -> tuple[int, bool]:
        """Return where an edit leaves least, and whether that is surely less than its placebo.

        The layer with the least is chosen afterwards: among those whose interval ends below the
        placebo's, if there are any.
        """
        sure = self.interval[arm, :, 1] < self.placebo_interval[arm, :, 0]
        return int(np.where(sure | ~sure.any(), self.left[arm], np.inf).argmin()), bool(sure.any())

    def _name_layer(self, arm: int) -> str:
        i, sure = self._find_least(arm)
        return f"layer {self.layers[i]} ({format_share(self.left[arm, i])})" if sure else "no layer"

    def figure(self) -> go.Figure:
        """Draw one line per layer, with a dot for each edit and a cross for its placebo."""
        dots = []
        for arm, name in enumerate((*(f"{edge} blocked" for edge in ARMS[:2]), ARMS[2])):
            dots += [
                Dots(name, self.left[arm], self.interval[arm]),
                Dots("placebo", self.placebo[arm], self.placebo_interval[arm], "placebo"),
            ]
        axis = Axis("what is left, share of the margin")
        return pairs([f"layer {layer}" for layer in self.layers], Pairs(dots, axis))


def edit(
    model: LanguageModel, known: Baseline, rng: np.random.Generator, offsets: Offsets = IN_PLACE
) -> Edited | None:
    """Block edges and exchange values in one layer at a time; None if no mixer has a matrix.

    In each forward pass, every couple of a row gets one arm or its placebo, so one pass measures
    all of them. If passes are cheap, they are repeated until every couple has had every arm.
    """
    layers = [i for i, b in enumerate(model.list_blocks()) if isinstance(b.mixer, MatrixMixer)]
    if not layers:
        return None
    b, c, _ = known.clean.shape
    seq_len, kinds = known.pairs.clean.inputs.shape[1], 2 * len(ARMS)
    cost = b * len(layers) * seq_len**2
    passes = kinds if c < kinds or cost * kinds <= MATRIX_ENTRIES * 2 else 1
    rows = min(b, max(4, MATRIX_ENTRIES // (len(layers) * seq_len**2 * passes)))
    known = known[:rows]
    pairs = known.pairs
    left, ends = np.zeros((kinds, len(layers))), np.zeros((kinds, len(layers), 2))
    followed = np.zeros((kinds, len(layers)))
    for i, layer in enumerate(layers):
        sums, counts = np.zeros((kinds, rows, 2)), np.zeros((kinds, 2), dtype=np.int64)
        for turn in range(passes):
            arm = (torch.arange(c, device=pairs.query.device) + turn) % kinds
            with ExitStack() as stack:
                for context in _make_edits(model, layer, pairs, arm, rng, offsets):
                    stack.enter_context(context)
                after = scored(model, pairs.clean)
            margins, answers = compute_margins(after, pairs), compute_answers(after, pairs.query)
            for kind in range(kinds):
                sums[kind] += known.sum_changes(margins, arm == kind)
                counted = (pairs.valid & (arm == kind))[:, :, None]
                counts[kind] += (
                    int((counted & (answers == pairs.wrong)).sum()),
                    2 * int(counted.sum()),
                )
        for kind in range(kinds):
            left[kind, i], ends[kind, i] = estimate_share(sums[kind], rng)
        followed[:, i] = counts[:, 0] / np.maximum(counts[:, 1], 1)
    return Edited(
        layers=np.array(layers),
        left=left[:3],
        interval=ends[:3],
        placebo=left[3:],
        placebo_interval=ends[3:],
        followed=followed[2],
        placebo_followed=followed[5],
        rows=rows,
        offsets=offsets,
    )


def _make_edits(
    model: LanguageModel,
    layer: int,
    pairs: Couples,
    arm: Int[Tensor, " c"],
    rng: np.random.Generator,
    offsets: Offsets,
) -> Iterator[AbstractContextManager[object]]:
    """Yield the interventions of one pass: couple c gets `arm[c]`, where 3 to 5 are placebos."""
    read, written = offsets.get(layer)
    query, key, value = pairs.query, pairs.key, pairs.value + read
    targets = torch.where((arm % 3 == 0)[:, None], query, pairs.value + written)
    sources = torch.where((arm % 3 == 0)[:, None], value, key)
    # A placebo's source is an earlier position that is not its couple's own.
    own, seq_len = torch.cat([key, pairs.value, value], -1), pairs.clean.inputs.shape[1]
    position = torch.arange(seq_len, device=targets.device)
    free = (position != own[..., None]).all(2, keepdim=True) & (position < targets[..., None])
    others = _draw_positions(free.flatten(0, 2), 1, rng).view_as(targets)
    sources = torch.where((arm >= 3)[:, None], others, sources)
    edges = (arm % 3 < 2)[:, None] & (sources >= 0) & (sources <= targets) & (targets < seq_len)
    if edges.any():
        yield block_edges(model, layer, targets[edges], sources[edges], rows=pairs.rows[edges])
    pairs = pairs.shift_values(read)
    places = locate_sites(pairs, rng)["elsewhere"]
    for couple in (arm % 3 == 2).nonzero()[:, 0].tolist():
        first, second = pairs.value[:, couple].unbind(-1)
        if arm[couple] >= 3:
            before = torch.arange(places.shape[1], device=places.device)
            before = before < query[:, couple].amin(-1, keepdim=True)
            chosen_at = _draw_positions(places & before, 2, rng)
            # In a row without two such positions, one is exchanged with itself.
            chosen_at = torch.where((chosen_at < 0).any(1, keepdim=True), 0, chosen_at)
            first, second = chosen_at.unbind(1)
        yield swap_values(model, layer, first, second)


def _draw_positions(
    free: Bool[Tensor, "n t"], many: int, rng: np.random.Generator
) -> Int[Tensor, "n many"]:
    """Draw distinct free positions in each row; −1 once there are no more."""
    order = torch.from_numpy(rng.random(tuple(free.shape))).to(free.device)
    order, chosen_at = order.masked_fill(~free, 2.0).sort(1)
    return chosen_at.masked_fill(order >= 1, -1)[:, :many]


def format_share(value: float) -> str:
    """Format a share with two digits, never as −0.00."""
    return "unknown" if np.isnan(value) else f"{round(float(value), 2) + 0.0:.2f}"


def format_ends(ends: Sequence[float] | Float[np.ndarray, "2"]) -> str:
    """Format the ends of an interval."""
    return "unknown" if np.isnan(ends[0]) else " to ".join(map(format_share, ends))

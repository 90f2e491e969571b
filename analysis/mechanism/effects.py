"""Measure what interventions do to recall, as a share of what exchanging two keys does."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from analysis.interventions import block_edges, patch, swap_values
from analysis.links import IN_PLACE, Offsets
from analysis.mechanism.edits import ARMS, Edited
from analysis.mechanism.swapped_keys import Couples, compute_couple_answers, compute_margins
from analysis.scoring import scored
from analysis.statistics.estimates import thin
from analysis.statistics.intervals import resample_sums
from lab.hooks import HookPoint
from lab.laws import MatrixMixer
from lab.models import Block
from lab.models.language_model import LanguageModel

SITES = ("key", "value", "query", "elsewhere", "placebo")
"""Where the residual stream is restored."""
SITE_NAMES: dict[str, str] = dict(
    zip(SITES, ("keys", "values", "queries", "all else", "as many others"), strict=True)
)
"""Names of the sites in sentences."""
DEPTHS = 9
"""Maximum number of depths at which to restore the residual stream, evenly spread."""
MATRIX_ENTRIES = 2**26
"""Maximum number of matrix entries to edit in all: they grow with the square of the row length."""


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
        interval: 95 % interval by resampling rows, low and high.
        rows: number of rows in the batch.
        queries: number of queries measured.
    """

    depths: Int[np.ndarray, " k"]
    share: Float[np.ndarray, "5 k"]
    interval: Float[np.ndarray, "5 k 2"]
    rows: int
    queries: int


@dataclass(frozen=True)
class Baseline:
    """Margins [b c 2] without any intervention.

    Attributes:
        clean: on the clean rows.
        corrupt: on the rows with exchanged keys.
        valid: the couples to count; all others are left out of every sum [b c].
    """

    clean: Float[Tensor, "b c 2"]
    corrupt: Float[Tensor, "b c 2"]
    valid: Bool[Tensor, "b c"]

    def sum_changes(
        self, margins: Float[Tensor, "b c 2"], chosen: Bool[Tensor, " c"] | None = None
    ) -> Float[np.ndarray, "b 2"]:
        """Return Σ (margins − corrupt) and Σ (clean − corrupt) per row, over the chosen couples."""
        valid = self.valid if chosen is None else self.valid & chosen
        changes = torch.stack([margins - self.corrupt, self.clean - self.corrupt], -1).double()
        return (changes * valid[:, :, None, None]).sum((1, 2)).cpu().numpy()

    def __getitem__(self, rows: slice) -> "Baseline":
        """Return the margins of some rows."""
        return Baseline(self.clean[rows], self.corrupt[rows], self.valid[rows])


def measure_baseline(model: LanguageModel, pairs: Couples) -> Baseline:
    """Measure the margins without any intervention."""
    return Baseline(
        compute_margins(scored(model, pairs.clean), pairs),
        compute_margins(scored(model, pairs.corrupt), pairs),
        pairs.valid,
    )


def estimate_share(
    sums: Float[np.ndarray, "b 2"], rng: np.random.Generator
) -> tuple[float, tuple[float, float]]:
    """Return a ratio of sums over rows and its 95 % interval; NaN if the divisor is not positive.

    The interval is NaN as soon as one resample has no positive divisor: dropping such resamples
    would make the interval too narrow.
    """
    unknown = math.nan, math.nan
    above, below = sums.sum(0)
    share = float(above / below) if below > 0 else math.nan
    if len(sums) < 2:
        return share, unknown
    over, under = resample_sums(sums, rng).T
    if not (under > 0).all():
        return share, unknown
    low, high = np.quantile(over / under, [0.025, 0.975])
    return share, (float(low), float(high))


def restore(
    model: LanguageModel, pairs: Couples, known: Baseline, rng: np.random.Generator
) -> Restored:
    """Restore the clean residual stream at each depth and site, one at a time."""
    n_layers = len(model.blocks)
    inner = np.array(thin(range(1, n_layers), DEPTHS), dtype=np.int64)
    names = [f"blocks.{depth}.hook_resid_pre" for depth in inner]
    clean: dict[str, Tensor] = {}

    def keep(residual: Tensor, point: HookPoint) -> None:
        clean[point.name] = residual

    if names:
        with model.hooks([(names, keep)]):
            scored(model, pairs.clean)
    found = np.zeros((len(SITES), len(inner) + 2))
    ends = np.zeros((len(SITES), len(inner) + 2, 2))
    found[SITES.index("key"), 0] = found[SITES.index("query"), -1] = 1
    ends[SITES.index("key"), 0] = ends[SITES.index("query"), -1] = 1
    places = {
        site: marks.nonzero(as_tuple=True) for site, marks in locate_sites(pairs, rng).items()
    }
    for i, name in enumerate(names, 1):
        for j, site in enumerate(SITES):
            rows, positions = places[site]
            with patch(model, name, clean[name], rows=rows, positions=positions):
                margins = compute_margins(scored(model, pairs.corrupt), pairs)
            found[j, i], ends[j, i] = estimate_share(known.sum_changes(margins), rng)
    return Restored(
        depths=np.array([0, *inner, n_layers]),
        share=found,
        interval=ends,
        rows=len(pairs.query),
        queries=2 * int(pairs.valid.sum()),
    )


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


def edit(
    model: LanguageModel,
    pairs: Couples,
    known: Baseline,
    rng: np.random.Generator,
    offsets: Offsets = IN_PLACE,
) -> Edited | None:
    """Block edges and exchange values in one layer at a time; None if no mixer has a matrix.

    In each forward pass, every couple of a row gets one arm or its placebo, so one pass measures
    all of them. If passes are cheap, they are repeated until every couple has had every arm.
    """
    layers = [
        layer
        for layer, block in enumerate(model.blocks)
        if isinstance(block, Block) and isinstance(block.mixer, MatrixMixer)
    ]
    if not layers:
        return None
    b, c, _ = pairs.query.shape
    seq_len, kinds = pairs.clean.inputs.shape[1], 2 * len(ARMS)
    cost = b * len(layers) * seq_len**2
    passes = kinds if c < kinds or cost * kinds <= MATRIX_ENTRIES * 2 else 1
    rows = min(b, max(4, MATRIX_ENTRIES // (len(layers) * seq_len**2 * passes)))
    pairs, known = pairs[:rows], known[:rows]
    left = np.zeros((kinds, len(layers)))
    ends = np.zeros((kinds, len(layers), 2))
    followed = np.zeros((2, len(layers)))
    for i, layer in enumerate(layers):
        sums = np.zeros((kinds, rows, 2))
        counts = np.zeros((kinds, 2))
        for turn in range(passes):
            arm = (torch.arange(c, device=pairs.query.device) + turn) % kinds
            with ExitStack() as stack:
                for context in _make_edits(model, layer, pairs, arm, rng, offsets):
                    stack.enter_context(context)
                after = scored(model, pairs.clean)
            margins, answers = compute_margins(after, pairs), compute_couple_answers(after, pairs)
            for kind in range(kinds):
                sums[kind] += known.sum_changes(margins, arm == kind)
                counted = (known.valid & (arm == kind))[:, :, None]
                counts[kind, 0] += int((counted & (answers == pairs.wrong)).sum())
                counts[kind, 1] += 2 * int(counted.sum())
        for kind in range(kinds):
            left[kind, i], ends[kind, i] = estimate_share(sums[kind], rng)
        both = counts[[2, 5]]
        followed[:, i] = both[:, 0] / np.maximum(both[:, 1], 1)
    return Edited(
        layers=np.array(layers),
        left=left[:3],
        interval=ends[:3],
        placebo=left[3:],
        placebo_interval=ends[3:],
        followed=followed[0],
        placebo_followed=followed[1],
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
    own, seq_len = torch.cat([key, pairs.value, value], -1), pairs.clean.inputs.shape[1]
    sources = torch.where(
        (arm >= 3)[:, None], _draw_other_sources(targets, own, seq_len, rng), sources
    )
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


def _draw_other_sources(
    targets: Int[Tensor, "b c 2"],
    own: Int[Tensor, "b c own"],
    seq_len: int,
    rng: np.random.Generator,
) -> Int[Tensor, "b c 2"]:
    """Draw for each target an earlier position that is not its couple's own; −1: none."""
    position = torch.arange(seq_len, device=targets.device)
    free = (position != own[..., None]).all(2, keepdim=True) & (position < targets[..., None])
    return _draw_positions(free.flatten(0, 2), 1, rng).view_as(targets)


def _draw_positions(
    free: Bool[Tensor, "n t"], many: int, rng: np.random.Generator
) -> Int[Tensor, "n many"]:
    """Draw distinct free positions in each row; −1 once there are no more."""
    order = torch.from_numpy(rng.random(tuple(free.shape))).to(free.device)
    order, chosen_at = order.masked_fill(~free, 2.0).sort(1)
    return chosen_at.masked_fill(order >= 1, -1)[:, :many]

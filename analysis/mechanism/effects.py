"""What interventions do to recall, as a share of what exchanging two keys does."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from analysis.interventions import block_edges, patch, swap_values
from analysis.mechanism.edits import ARMS, Edited
from analysis.mechanism.swapped_keys import Couples, couple_answers, margin
from analysis.scoring import scored
from analysis.statistics.estimates import thin
from analysis.statistics.intervals import bootstrap
from lab.hooks import HookPoint
from lab.laws import MatrixMixer
from lab.models import Block
from lab.models.language_model import LanguageModel

SITES = ("key", "value", "query", "elsewhere", "placebo")
"""Where the residual stream is restored."""
SPOKEN: dict[str, str] = dict(
    zip(SITES, ("keys", "values", "queries", "all else", "as many others"), strict=True)
)
"""What the sites are called in a sentence."""
DEPTHS = 9
"""Most depths at which the residual stream is restored; of more they are evenly spread."""
MATRIX_ENTRIES = 2**26
"""Entries of all matrices that are edited: they are quadratic, and their rows much alike."""


@dataclass(frozen=True)
class Restored:
    """The residual stream of the clean rows, put into the corrupt ones at some positions.

        share = Σ (patched − corrupt) / Σ (clean − corrupt)  of the margin, over queries

    The margin is logit(right answer of the clean row) − logit(that of the corrupt row). 0: the
    answer is the corrupt row's; 1: it is the clean one's.

    Sites: the couples' key, value or query positions; "elsewhere" all others; "placebo" as many
    random others as there are values.

    Attributes:
        depths: blocks behind the residual stream, 0 … L [k]. The ends are so by construction: at 0
            only the key tokens differ, at L only the queries' own residual is read.
        share: a row a site, in the order of `SITES`.
        interval: 95 % by resampling rows, low and high.
        rows: of the batch.
        queries: that were measured.
    """

    depths: Int[np.ndarray, " k"]
    share: Float[np.ndarray, "5 k"]
    interval: Float[np.ndarray, "5 k 2"]
    rows: int
    queries: int


@dataclass(frozen=True)
class Baseline:
    """Margins [b c 2] without intervention; what is not valid counts nowhere.

    Attributes:
        clean: on the clean rows.
        corrupt: on those with exchanged keys.
        valid: couples that count [b c].
    """

    clean: Float[Tensor, "b c 2"]
    corrupt: Float[Tensor, "b c 2"]
    valid: Bool[Tensor, "b c"]

    def sums(
        self, margins: Float[Tensor, "b c 2"], chosen: Bool[Tensor, " c"] | None = None
    ) -> Float[np.ndarray, "b 2"]:
        """Return by row Σ (margins − corrupt) and Σ (clean − corrupt), of some couples."""
        valid = self.valid if chosen is None else self.valid & chosen
        changes = torch.stack([margins - self.corrupt, self.clean - self.corrupt], -1).double()
        return (changes * valid[:, :, None, None]).sum((1, 2)).cpu().numpy()

    def __getitem__(self, rows: slice) -> "Baseline":
        """Return those of some rows."""
        return Baseline(self.clean[rows], self.corrupt[rows], self.valid[rows])


def baseline(model: LanguageModel, pairs: Couples) -> Baseline:
    """Measure the margins without intervention."""
    return Baseline(
        margin(scored(model, pairs.clean), pairs),
        margin(scored(model, pairs.corrupt), pairs),
        pairs.valid,
    )


def share(
    sums: Float[np.ndarray, "b 2"], rng: np.random.Generator
) -> tuple[float, tuple[float, float]]:
    """Return a ratio of sums over rows and its 95 % interval; NaN where nothing divides it.

    The interval is NaN as soon as one resample has nothing to divide by: without it, the rest would
    look surer than they are.
    """
    ratios: list[float] = []

    def ratio(sums: Float[np.ndarray, "b 2"]) -> float:
        ratios.append(_ratio(sums))
        return ratios[-1]

    low, high = bootstrap(sums, rng, statistic=ratio)
    unsure = bool(np.isnan(ratios).any())
    return _ratio(sums), (math.nan, math.nan) if unsure else (low, high)


def _ratio(sums: Float[np.ndarray, "b 2"]) -> float:
    above, below = sums.sum(0)
    return float(above / below) if below > 0 else math.nan


def restore(
    model: LanguageModel, pairs: Couples, known: Baseline, rng: np.random.Generator
) -> Restored:
    """Restore the residual stream at each depth and site, one at a time."""
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
    places = {site: marks.nonzero(as_tuple=True) for site, marks in places_of(pairs, rng).items()}
    for i, name in enumerate(names, 1):
        for j, site in enumerate(SITES):
            rows, positions = places[site]
            with patch(model, name, clean[name], rows=rows, positions=positions):
                margins = margin(scored(model, pairs.corrupt), pairs)
            found[j, i], ends[j, i] = share(known.sums(margins), rng)
    return Restored(
        depths=np.array([0, *inner, n_layers]),
        share=found,
        interval=ends,
        rows=len(pairs.query),
        queries=2 * int(pairs.valid.sum()),
    )


def places_of(pairs: Couples, rng: np.random.Generator) -> dict[str, Bool[Tensor, "b t"]]:
    """Return the positions of each site."""
    none = torch.zeros_like(pairs.clean.inputs, dtype=torch.bool)
    sites = {
        site: none.scatter(1, positions.flatten(1), True)
        for site, positions in zip(SITES, (pairs.key, pairs.value, pairs.query), strict=False)
    }
    sites["elsewhere"] = ~(sites["key"] | sites["value"] | sites["query"])
    before = torch.arange(none.shape[1], device=none.device) < pairs.query.amax((1, 2))[:, None]
    chosen_at = _draw_positions(sites["elsewhere"] & before, pairs.value[0].numel(), rng)
    # What could not be drawn stands at −1 and lands in a column that is cut off.
    wide = torch.zeros(none.shape[0], none.shape[1] + 1, dtype=torch.bool, device=none.device)
    sites["placebo"] = wide.scatter(1, chosen_at % wide.shape[1], True)[:, :-1]
    return sites


def edit(
    model: LanguageModel, pairs: Couples, known: Baseline, rng: np.random.Generator
) -> Edited | None:
    """Block edges and exchange values, layer by layer; None where no mixer has a matrix.

    Each couple of a row takes one arm or its placebo at a time, so that a pass measures all of
    them; where passes are cheap there are as many as it takes for every couple to have had all.
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
                for context in _edits(model, layer, pairs, arm, rng):
                    stack.enter_context(context)
                after = scored(model, pairs.clean)
            margins, answers = margin(after, pairs), couple_answers(after, pairs)
            for kind in range(kinds):
                sums[kind] += known.sums(margins, arm == kind)
                counted = (known.valid & (arm == kind))[:, :, None]
                counts[kind, 0] += int((counted & (answers == pairs.wrong)).sum())
                counts[kind, 1] += 2 * int(counted.sum())
        for kind in range(kinds):
            left[kind, i], ends[kind, i] = share(sums[kind], rng)
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
    )


def _edits(
    model: LanguageModel,
    layer: int,
    pairs: Couples,
    arm: Int[Tensor, " c"],
    rng: np.random.Generator,
) -> Iterator[AbstractContextManager[object]]:
    """Yield the interventions of one pass: couple c takes `arm[c]`, placebos follow the arms."""
    query, key, value = pairs.query, pairs.key, pairs.value
    targets = torch.where((arm % 3 == 0)[:, None], query, value)
    sources = torch.where((arm % 3 == 0)[:, None], value, key)
    sources = torch.where((arm >= 3)[:, None], _other_sources(targets, pairs, rng), sources)
    edges = (arm % 3 < 2)[:, None] & (sources >= 0)
    if edges.any():
        yield block_edges(model, layer, targets[edges], sources[edges], rows=pairs.rows[edges])
    places = places_of(pairs, rng)["elsewhere"]
    for couple in (arm % 3 == 2).nonzero()[:, 0].tolist():
        first, second = value[:, couple].unbind(-1)
        if arm[couple] >= 3:
            before = torch.arange(places.shape[1], device=places.device)
            before = before < query[:, couple].amin(-1, keepdim=True)
            chosen_at = _draw_positions(places & before, 2, rng)
            # A row without two such positions exchanges one with itself.
            chosen_at = torch.where((chosen_at < 0).any(1, keepdim=True), 0, chosen_at)
            first, second = chosen_at.unbind(1)
        yield swap_values(model, layer, first, second)


def _other_sources(
    targets: Int[Tensor, "b c 2"], pairs: Couples, rng: np.random.Generator
) -> Int[Tensor, "b c 2"]:
    """Draw for each target an earlier position, neither key nor value of its couple; −1: none."""
    seq_len = pairs.clean.inputs.shape[1]
    position = torch.arange(seq_len, device=targets.device)
    own = torch.cat([pairs.key, pairs.value], -1)
    free = (position != own[..., None]).all(2, keepdim=True) & (position < targets[..., None])
    return _draw_positions(free.flatten(0, 2), 1, rng).view_as(targets)


def _draw_positions(
    free: Bool[Tensor, "n t"], many: int, rng: np.random.Generator
) -> Int[Tensor, "n many"]:
    """Draw distinct positions of each row among the free ones; −1 where there are no more."""
    order = torch.from_numpy(rng.random(tuple(free.shape))).to(free.device)
    order, chosen_at = order.masked_fill(~free, 2.0).sort(1)
    return chosen_at.masked_fill(order >= 1, -1)[:, :many]

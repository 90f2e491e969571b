"""The dynamic masks of a model: which keys each head's hides, and the attention that it moves.

A key is masked for a query if its bias leaves it less than `LIGHT` of the weight of the query's
most favoured key, e^(b_s − max b) < 0.05, or if it is outside the layer's window. If all of a
query's keys have the same bias, as when all are `MASKED`, it cancels and none is masked by it.

A is a layer's attention; A⁰ that of the same queries and keys without bias and window.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from einops import rearrange, reduce
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from analysis.links import find_pairs, has_pairs
from analysis.scoring import record
from analysis.words import name_head
from lab.hooks import HookPoint
from lab.intervals import Estimate, estimate_ratio
from lab.layers.attention import Attention
from lab.layers.mask import MASKS
from lab.models import LanguageModel
from lab.models.evaluation import find_stored_positions
from lab.ops.attention import attention_pattern, repeat_heads
from lab.ops.top_keys import ranks_and_floors
from tasks.base import IGNORE, Batch

LIGHT = 0.05
"""The weight, relative to the most favoured key's, below which a key counts as masked."""
MOVES = 0.001
"""The least share of its attention that a mask must move to count as doing anything."""
BANDS = 8
"""Number of equal bands of positions."""
MOST = 8
"""Maximum number of heads of a figure or a table."""
ENTRIES = 2**21
"""Attention entries held in memory at once."""


@dataclass(frozen=True)
class MaskedLayer:
    """A layer with a dynamic mask, and its tensors on a batch.

    Attributes:
        q, k: queries and keys, rotated to their positions.
        bias: what the mask adds to the scores of each key, nats.
    """

    layer: int
    module: Attention
    q: Float[Tensor, "b t h p"]
    k: Float[Tensor, "b t h_kv p"]
    bias: Float[Tensor, "b h_kv t"]

    @cached_property
    def onset(self) -> Int[Tensor, "b h_kv t"]:
        """The first position whose query, and all later ones, finds each key masked."""
        return find_onsets(self.bias, self.module.window)

    def iterate_patterns(self) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
        """Yield (rows r of the batch, targets n, A, A⁰, whether masked [r h n s]) by blocks."""
        batch, seq_len, n_heads, _ = self.q.shape
        window, position = self.module.window, torch.arange(seq_len, device=self.q.device)
        exits = None if window is None else find_window_exits(self.bias, window)
        rows = max(1, ENTRIES // (n_heads * seq_len**2))
        height = max(1, min(seq_len, ENTRIES // (n_heads * seq_len)))
        for row, first in np.ndindex(math.ceil(batch / rows), math.ceil(seq_len / height)):
            some = slice(row * rows, (row + 1) * rows)
            at = slice(first * height, min(seq_len, (first + 1) * height))
            q = rearrange(self.q[some, at], "b t h p -> b h t p")
            k = rearrange(self.k[some, : at.stop], "b s h p -> b h s p")
            query = position[at, None]
            keep = exits
            if keep is not None:
                keep = repeat_heads(keep[some, :, None, : at.stop] > query, n_heads)
            pattern = attention_pattern(q, k, self.bias[some, :, : at.stop], keep)
            masked = repeat_heads(self.onset[some, :, None, : at.stop] <= query, n_heads)
            yield some, at, pattern, attention_pattern(q, k), masked


def find_masked_layers(model: LanguageModel) -> dict[int, Attention]:
    """Return the attention layers that have a dynamic mask, by block."""
    mixers = {i: getattr(block, "mixer", None) for i, block in enumerate(model.blocks)}
    return {i: m for i, m in mixers.items() if isinstance(m, Attention) and m.mask is not None}


def name_mask(module: Attention) -> str:
    """Return the name of a layer's mask among `MASKS`; "own" if it is not one of the lab's."""
    return next((name for name, cls in MASKS.items() if type(module.mask) is cls), "own")


def name_mask_points(layers: Iterable[int]) -> list[str]:
    """Return the hook points through which the biases of these layers pass."""
    return [f"blocks.{i}.mixer.hook_dynamic_mask" for i in layers]


def record_masked_layers(model: LanguageModel, batch: Batch) -> list[MaskedLayer]:
    """Run a model on a batch and return its masked layers with their tensors."""
    layers = find_masked_layers(model)
    points = ("hook_rot_q", "hook_rot_k", "hook_dynamic_mask")
    seen = record(model, batch, [f"blocks.{i}.mixer.{point}" for i in layers for point in points])
    found = []
    for i, module in layers.items():
        q, k, bias = (seen[f"blocks.{i}.mixer.{point}"] for point in points)
        found.append(MaskedLayer(i, module, q, k, bias[:, :, 0]))
    return found


def disable_masks(model: LanguageModel, layers: Iterable[int]) -> AbstractContextManager[nn.Module]:
    """Set the biases of some layers to zero for a `with` block.

    A window, if there is one, then keeps the latest keys.
    """

    def clear(bias: Tensor, point: HookPoint) -> Tensor:
        return torch.zeros_like(bias)

    return model.hooks([(name_mask_points(layers), clear)])


def find_onsets(bias: Float[Tensor, "b h t"], window: int | None = None) -> Int[Tensor, "b h t"]:
    """Return the first position from which on queries find each key masked; t where none does.

    A masked key stays masked: later queries have the same keys and more, so that the most favoured
    one is favoured no less, and the keys that outrank this one stay.
    """
    exact = bias.double().contiguous()
    best = exact.cummax(-1).values
    first = torch.searchsorted(best, exact - math.log(LIGHT), right=True)
    if window is not None:
        first = torch.minimum(first, find_window_exits(bias, window))
    return torch.maximum(first, torch.arange(bias.shape[-1], device=bias.device))


def find_window_exits(bias: Float[Tensor, "b h t"], window: int) -> Int[Tensor, "b h t"]:
    """Return the first position from which on each key is outside the window; t where none is."""
    rank, floor = ranks_and_floors(bias, window, bias.shape[-1])
    # Until the window is full it keeps every key.
    floor[..., : window - 1] = -1
    return torch.searchsorted(floor.contiguous(), rank.contiguous(), right=True)


def count_readers(
    onset: Int[Tensor, "b h t"], asking: Bool[Tensor, "b t"]
) -> tuple[Int[Tensor, "b h t"], Int[Tensor, "b t"]]:
    """Return for how many of the asking queries each key is kept, and for how many it is eligible.

    A key is eligible for the queries at its own position and later.
    """
    before = torch.nn.functional.pad(asking.long().cumsum(-1), (1, 0))
    until = before[:, None].expand(-1, onset.shape[1], -1).gather(-1, onset)
    return until - before[:, None, :-1], before[:, -1:] - before[:, :-1]


@dataclass(frozen=True)
class StoredPairs:
    """What a mask does to the pairs that a row stores, at the scored queries.

    Attributes:
        precision: share of the kept keys that are stored; chance: the share of all keys that are.
        recall: share of the stored keys that are kept; chance: the share of all keys kept.
        auroc: P(bias of a stored key > bias of another), ties count half; chance ½.
        hidden: share of the queries whose answer's value is masked; chance: the share of keys.
        lost_answer: share of the lost mass that lay on the answer's value; chance: A⁰'s share.
        lost_unstored: the same for the keys that no pair stored.
        answer: attention on the answer's value; chance: the same without the mask, A⁰.
        gained: their difference; chance 0.
        key: attention of stored values on their own key, the edge that binds a pair; chance: the
            same without the mask.
        key_gained: their difference; chance 0.
        key_uniform: the attention on that key if it were the same on all keys up to the value.
    """

    precision: Estimate
    recall: Estimate
    auroc: Estimate
    hidden: Estimate
    lost_answer: Estimate
    lost_unstored: Estimate
    answer: Estimate
    gained: Estimate
    key: Estimate
    key_gained: Estimate
    key_uniform: float

    @property
    def unbinds(self) -> bool:
        """Whether values lose attention to a key that without the mask gets more than evenly."""
        return self.key.chance > self.key_uniform and self.key_gained.high < -MOVES


@dataclass(frozen=True)
class MaskedHead:
    """What the mask of one key head does; shares are of pairs of a query and an eligible key.

    Attributes:
        n_heads: number of key heads of the layer.
        lightest: the least weight, relative to the most favoured key's, that the bias leaves a key.
        kept: share of the eligible keys that are not masked, over all queries.
        kept_by_role: the same by the key's role; NaN for a role that no key has.
        kept_by_band: the same by role and by band of positions, equal bands of the row.
        weight_by_role: mean weight e^(b − max b) relative to the query's most favoured key, window
            ignored, by the key's role; NaN for a role that no key has.
        lost: share Σ_masked A⁰ of a scored query's attention that without the mask lies on keys
            that the mask removes; chance: the share of keys that it removes.
        moved: total variation ½ Σ|A − A⁰| of a scored query's attention.
        pairs: None for a task without stored pairs.
    """

    layer: int
    head: int
    n_heads: int
    reading: str
    lightest: float
    kept: float
    kept_by_role: Float[np.ndarray, " roles"]
    kept_by_band: Float[np.ndarray, "roles bands"]
    weight_by_role: Float[np.ndarray, " roles"]
    lost: Estimate
    moved: float
    pairs: StoredPairs | None

    @property
    def name(self) -> str:
        """The layer, and the head if the layer has several."""
        return name_key_head(self.layer, self.head, self.n_heads)

    @property
    def removed(self) -> str:
        """What the mask removes, in a word.

        "noise" if the answers' values get more attention with the mask than without it, "answers"
        if they get less, "both" if they get more but some are masked, "neither" if the attention
        on them stays. "keys" if values lose their own key, unless answers clearly lose as well.
        "nothing" if it moves next to no attention, "undecided" if the intervals do not tell.
        """
        unbinds = self.pairs is not None and self.pairs.unbinds
        if self.moved < MOVES and not unbinds:
            return "nothing"
        if self.pairs is None:
            return "undecided"
        gained = self.pairs.gained
        if unbinds and gained.high >= -MOVES:
            return "keys"
        if -MOVES < gained.low <= gained.high < MOVES:
            return "neither"
        if gained.high < 0:
            return "answers"
        if gained.low > 0:
            return "both" if self.pairs.hidden.value > MOVES else "noise"
        return "undecided"


def name_key_head(layer: int, head: int, n_heads: int) -> str:
    """Name a key head, by its layer alone if that has no other."""
    return f"layer {layer}" if n_heads == 1 else name_head(layer, head)


def pick_heads(values: Sequence[float]) -> list[int]:
    """Return the indices of the `MOST` smallest values, in ascending order of index."""
    return sorted(np.argsort(values, kind="stable")[:MOST].tolist())


@torch.no_grad()
def measure_heads(
    layer: MaskedLayer, batch: Batch, n_roles: int, rng: np.random.Generator
) -> list[MaskedHead]:
    """Measure what the mask of each of a layer's key heads does on a batch."""
    asking = find_asking(batch)
    kept_of_all, eligible_of_all = count_readers(layer.onset, torch.ones_like(asking))
    band = torch.arange(asking.shape[1], device=asking.device) * BANDS // asking.shape[1]
    kept, weight, eligible = (
        sum_by_role(part, batch.roles, n_roles, band, BANDS)
        for part in (kept_of_all, sum_weights(layer.bias), eligible_of_all[:, None])
    )
    with np.errstate(invalid="ignore"):
        by_band = kept / eligible
        by_role, weight_by_role = (part.sum(-1) / eligible.sum(-1) for part in (kept, weight))
    bias = layer.bias.double()
    lightest = (bias - bias.amax(-1, keepdim=True)).amin((0, 2)).exp().tolist()
    readers, could_read = count_readers(layer.onset, asking)
    sums = sum_attention(layer, batch)
    moved = (sums["moved"].sum(0) / sums["asked"].sum(0)).tolist()
    found = []
    for head in range(len(lightest)):
        of_head = {name: total[:, head] for name, total in sums.items()}
        removed = 1 - float(readers[:, head].sum().double() / could_read.sum())
        pairs = None
        if has_pairs(batch):
            pairs = measure_pairs(bias[:, head], readers[:, head], could_read, batch, of_head, rng)
        found.append(
            MaskedHead(
                layer=layer.layer,
                head=head,
                n_heads=len(lightest),
                reading=name_mask(layer.module),
                lightest=lightest[head],
                kept=float(kept[head].sum() / eligible.sum()),
                kept_by_role=by_role[head],
                kept_by_band=by_band[head],
                weight_by_role=weight_by_role[head],
                lost=estimate_ratio(of_head["lost"], of_head["asked"], removed, rng),
                moved=moved[head],
                pairs=pairs,
            )
        )
    return found


def measure_pairs(
    bias: Float[Tensor, "b t"],
    kept: Int[Tensor, "b t"],
    eligible: Int[Tensor, "b t"],
    batch: Batch,
    sums: dict[str, Float[Tensor, " b"]],
    rng: np.random.Generator,
) -> StoredPairs:
    """Compare one head's kept keys, and the attention its mask moves, with the stored pairs.

    Args:
        bias: of each key.
        kept: number of scored queries for which the key is kept.
        eligible: number of scored queries at or after the key.
        batch: the rows.
        sums: what `sum_attention` found in each row.
        rng: draws the resampled rows.
    """
    stored, asked, storing = find_stored_positions(batch), sums["asked"], sums["storing"]
    right, pairs = (kept * stored).sum(1), (eligible * stored).sum(1)
    base, share = (float(n.sum().double() / eligible.sum()) for n in (pairs, kept))
    ranked = auroc(bias, eligible * stored, eligible * ~stored)
    free_answer, free_unstored = (
        float(sums[name].sum() / asked.sum()) for name in ("free_answer", "free_unstored")
    )
    free_key, uniform_key = (
        float(sums[name].sum() / storing.sum()) for name in ("free_key", "uniform_key")
    )
    return StoredPairs(
        precision=estimate_ratio(right, kept.sum(1), base, rng),
        recall=estimate_ratio(right, pairs, share, rng),
        auroc=estimate_ratio(ranked, torch.ones_like(ranked), 0.5, rng),
        hidden=estimate_ratio(sums["hidden_answer"], asked, 1 - share, rng),
        lost_answer=estimate_ratio(sums["lost_answer"], sums["lost"], free_answer, rng),
        lost_unstored=estimate_ratio(sums["lost_unstored"], sums["lost"], free_unstored, rng),
        answer=estimate_ratio(sums["answer"], asked, free_answer, rng),
        gained=estimate_ratio(sums["answer"] - sums["free_answer"], asked, 0.0, rng),
        key=estimate_ratio(sums["key"], storing, free_key, rng),
        key_gained=estimate_ratio(sums["key"] - sums["free_key"], storing, 0.0, rng),
        key_uniform=uniform_key,
    )


def sum_attention(layer: MaskedLayer, batch: Batch) -> dict[str, Float[Tensor, "b h_kv"]]:
    """Sum over the queries of each row, by key head, what the mask removes, moves and leaves.

    Returns:
        `asked`, how many queries are scored, and over these `lost`, A⁰ on masked keys, and `moved`,
        ½ Σ|A − A⁰|. With stored pairs also, of the keys outside them, `lost_unstored` and
        `free_unstored`, A⁰ on those masked and on all; on the answer's value `answer`, A,
        `free_answer`, A⁰, `lost_answer`, A⁰ where it is masked, and `hidden_answer`, how often it
        is; and over the stored values, `storing` in number, `key`, `free_key` and `uniform_key`:
        A, A⁰ and even attention on their own key.
    """
    asking, n_kv_heads = find_asking(batch), layer.module.n_kv_heads
    sums: dict[str, Float[Tensor, "b h_kv"]] = {}
    links = None
    if has_pairs(batch):
        query, key, value = find_pairs(batch)
        links = find_stored_positions(batch), locate(batch, query, value), locate(batch, value, key)
    for rows, at, pattern, free, masked in layer.iterate_patterns():
        lost, asked = free * masked, asking[rows, None, at].to(free).expand(free.shape[:3])
        parts = {
            "asked": asked,
            "lost": asked * lost.sum(-1),
            "moved": asked * (pattern - free).abs().sum(-1) / 2,
        }
        if links is not None:
            stored, answers, keys = (part[rows, None] for part in links)
            unstored = ~stored[:, :, None, : at.stop]
            storing = (keys[..., at] >= 0).to(free).expand(free.shape[:3])
            parts["lost_unstored"] = asked * (lost * unstored).sum(-1)
            parts["free_unstored"] = asked * (free * unstored).sum(-1)
            parts["storing"] = storing
            parts["uniform_key"] = storing / torch.arange(at.start + 1, at.stop + 1).to(free)
            for name, source, counted, matrix in (
                ("answer", answers, asked, pattern),
                ("free_answer", answers, asked, free),
                ("lost_answer", answers, asked, lost),
                ("hidden_answer", answers, asked, masked),
                ("key", keys, storing, pattern),
                ("free_key", keys, storing, free),
            ):
                place = source[..., at, None].clamp(min=0).expand(*free.shape[:3], 1)
                parts[name] = counted * matrix.gather(-1, place)[..., 0]
        for name, part in parts.items():
            total = reduce(part.double(), "b (h g) t -> b h", "sum", h=n_kv_heads)
            known = sums.setdefault(name, total.new_zeros(len(asking), n_kv_heads))
            known[rows] += total * n_kv_heads / layer.module.n_heads
    return sums


def find_asking(batch: Batch) -> Bool[Tensor, "b t"]:
    """Return the scored queries; of a task with stored pairs, those that ask for one of them."""
    asking = batch.targets != IGNORE
    if has_pairs(batch):
        query, _, value = find_pairs(batch)
        asking &= locate(batch, query, value) >= 0
    return asking


def locate(batch: Batch, from_: Int[Tensor, "b n"], to: Int[Tensor, "b n"]) -> Int[Tensor, "b t"]:
    """Return for each position of a row the one that it is linked to; −1 where there is none."""
    seq_len = batch.inputs.shape[1]
    # Padding, −1, goes to an extra column that is cut off.
    at = torch.full((len(to), seq_len + 1), -1, device=to.device)
    return at.scatter_(1, from_ % (seq_len + 1), to)[:, :seq_len]


def sum_weights(bias: Float[Tensor, "b h t"]) -> Float[Tensor, "b h t"]:
    """Sum e^(b_s − max b), a key's weight relative to the most favoured, over its queries."""
    bias = bias.double()
    best = bias.cummax(-1).values
    later = (-best).flip(-1).logcumsumexp(-1).flip(-1)
    return (bias + later).exp()


def sum_by_role(
    values: Shaped[Tensor, "b h t"],
    roles: Int[Tensor, "b t"],
    n_roles: int,
    place: Int[Tensor, " t"],
    n_places: int,
) -> Float[np.ndarray, "h roles places"]:
    """Sum over the keys of each role in each place, the number of a group of positions."""
    sums = values.new_zeros(values.shape[1], n_roles * n_places, dtype=torch.float64)
    group = (roles * n_places + place).flatten()
    sums.index_add_(1, group, rearrange(values.double(), "b h t -> h (b t)"))
    return sums.unflatten(1, (n_roles, n_places)).cpu().numpy()


def auroc(
    values: Float[Tensor, "*b n"],
    positive: Shaped[Tensor, "*b n"],
    negative: Shaped[Tensor, "*b n"],
) -> Float[Tensor, "*b"]:
    """Return P(value of a positive > value of a negative) + ½ P(equal), for weighted items.

    Args:
        values: by which the items are ranked.
        positive: weights ≥ 0 of the items as positives.
        negative: weights ≥ 0 as negatives. The result is NaN where either sum is zero.
    """
    exact = values.double().contiguous()
    ranked, order = exact.sort(dim=-1)
    weight = torch.nn.functional.pad(negative.double().gather(-1, order).cumsum(-1), (1, 0))
    below = weight.gather(-1, torch.searchsorted(ranked, exact))
    upto = weight.gather(-1, torch.searchsorted(ranked, exact, right=True))
    wins = (positive * (below + upto) / 2).sum(-1)
    return wins / (positive.sum(-1) * negative.sum(-1))

"""Causes of errors: in the row, a dynamic mask that hides the value, and decay that weakens it.

Axis letter of this file, besides the package's: w wrong answer.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from analysis.dynamic_mask.masks import find_masked_layers, find_onsets, name_mask_points
from analysis.links import find_pairs, has_pairs
from analysis.scoring import scored
from lab.hooks import HookPoint
from lab.layers.ssd import SSD
from lab.models import LanguageModel
from lab.models.evaluation import find_stored_positions, score
from tasks.base import IGNORE, Batch

DECOY, MASKED, DECAYED, OTHER_PAIR, IN_ROW, OUTRANKED, UNKNOWN = (
    "a decoy's follower",
    "masked away",
    "decayed below its rival",
    "another pair's value",
    "another token of the row",
    "right value outranked",
    "unknown",
)
CAUSES = (DECOY, MASKED, DECAYED, OTHER_PAIR, IN_ROW, OUTRANKED, UNKNOWN)
"""In order of precedence: an error is attributed to the first cause that applies."""
BLOCK_ENTRIES = 2**20
"""Maximum number of tokens that are compared with answers at once."""
READS = 2.0
"""An SSD head is a reader if it weights right values this many times more than other values."""


@dataclass(frozen=True)
class Questions:
    """Scored positions, and where the row stores what they ask for.

    Attributes:
        pairs: index among the row's links; −1 where the task names none, as in keys and values.
    """

    rows: Int[np.ndarray, " w"]
    positions: Int[np.ndarray, " w"]
    targets: Int[np.ndarray, " w"]
    pairs: Int[np.ndarray, " w"]
    keys: Int[np.ndarray, " w"]
    values: Int[np.ndarray, " w"]

    def __getitem__(self, chosen: np.ndarray | slice) -> "Questions":
        """Select some of the questions."""
        return Questions(*(part[chosen] for part in vars(self).values()))

    def __len__(self) -> int:
        return len(self.rows)

    def iterate_blocks(self, width: int) -> Iterator[slice]:
        """Yield slices so short that `width` entries a question fit into memory."""
        size = max(1, BLOCK_ENTRIES // max(1, width))
        yield from (slice(i, i + size) for i in range(0, len(self), size))


def find_questions(batch: Batch) -> Questions:
    """Return the scored positions of a batch, row by row."""
    rows, positions = (batch.targets != IGNORE).cpu().numpy().nonzero()
    targets = batch.targets.cpu().numpy()[rows, positions]
    none = np.full(len(rows), -1)
    if not has_pairs(batch):
        return Questions(rows, positions, targets, none, none, none)
    query, key, value = (link.cpu().numpy() for link in find_pairs(batch))
    pair_at = np.full(batch.targets.shape, -1)
    row, pair = (query >= 0).nonzero()
    pair_at[row, query[row, pair]] = pair
    pairs = pair_at[rows, positions]
    found = pairs >= 0
    return Questions(
        rows,
        positions,
        targets,
        pairs,
        np.where(found, key[rows, pairs], -1),
        np.where(found, value[rows, pairs], -1),
    )


def search_rows(
    batch: Batch, questions: Questions, answers: Int[np.ndarray, " w"]
) -> tuple[Bool[np.ndarray, " w"], Int[np.ndarray, " w"], Int[np.ndarray, " w"]]:
    """Find where each answer occurs in its row.

    Returns:
        whether it follows a decoy: an earlier token that equals the queried key and is not the
        stored key itself; the index of the other pair whose stored value it is, −1 where there is
        none; and its last position up to the query, −1 where it does not occur. Where the task
        stores no pairs, there are neither decoys nor other pairs.
    """
    inputs, values = batch.inputs.cpu().numpy(), find_values(batch)
    decoys, pairs, seen = [np.zeros(0, bool)], [np.zeros(0, int)], [np.zeros(0, int)]
    place, index = np.arange(inputs.shape[1]), np.arange(values.shape[1])
    for part in questions.iterate_blocks(inputs.shape[1]):
        some, row, given = questions[part], inputs[questions.rows[part]], answers[part, None]
        until, linked = some.positions[:, None], (some.pairs >= 0)[:, None]
        same = row == given
        decoy = (row == np.take_along_axis(row, until, 1)) & (place < until) & linked
        decoy &= place != some.keys[:, None]
        decoys.append((decoy[:, :-1] & same[:, 1:]).any(1))
        where = values[some.rows]
        other = (np.take_along_axis(row, np.maximum(where, 0), 1) == given) & (where >= 0)
        other &= (where < until) & (index != some.pairs[:, None]) & linked
        pairs.append(np.where(other.any(1), other.argmax(1), -1))
        seen.append(np.where(same & (place <= until), place, -1).max(1))
    return np.concatenate(decoys), np.concatenate(pairs), np.concatenate(seen)


def find_values(batch: Batch) -> Int[np.ndarray, "b pairs"]:
    """Return the positions of the stored values, padded with −1."""
    if not has_pairs(batch):
        return np.full((len(batch.inputs), 1), -1)
    return find_pairs(batch)[2].cpu().numpy()


def draw_wrong_answers(
    questions: Questions, pool: Int[np.ndarray, " q"], rounds: int, rng: np.random.Generator
) -> Int[np.ndarray, "rounds w"]:
    """Draw wrong answers from a pool of tokens; −1 where the pool holds only the right one."""
    kinds, count = np.unique(pool, return_counts=True)
    answers = rng.choice(kinds, (rounds, len(questions)), p=count / count.sum())
    for _ in range(64):
        same = answers == questions.targets
        if not same.any():
            return answers
        answers[same] = rng.choice(kinds, same.sum(), p=count / count.sum())
    return np.where(answers == questions.targets, -1, answers)


def draw_other_values(
    batch: Batch, questions: Questions, rng: np.random.Generator
) -> Int[np.ndarray, " w"]:
    """Draw the position of another pair's stored value for each question; −1 if there is none."""
    values = find_values(batch)
    found = np.full(len(questions), -1)
    for part in questions.iterate_blocks(values.shape[1]):
        some = questions[part]
        where = values[some.rows]
        legal = (where >= 0) & (where < some.positions[:, None])
        legal &= where != some.values[:, None]
        picked = np.where(legal, rng.random(legal.shape), -1.0).argmax(1)
        chosen = np.take_along_axis(where, picked[:, None], 1)[:, 0]
        found[part] = np.where(legal.any(1), chosen, -1)
    return found


def find_neighbours(
    batch: Batch, questions: Questions, pairs: Int[np.ndarray, " w"]
) -> tuple[Bool[np.ndarray, " g"], float]:
    """Find which answers from another pair come from the pair next to the right one.

    Returns:
        a flag for each error that answers another pair's value, and the share of flags if all
        other pairs of the row were equally likely; NaN where there are no such errors.
    """
    given = pairs >= 0
    if not given.any():
        return np.zeros(0, bool), math.nan
    some, values = questions[given], find_values(batch)
    late = np.where(values < 0, batch.inputs.shape[1], values)
    order = late.argsort(1, kind="stable").argsort(1)[some.rows]
    mine, theirs = (np.take_along_axis(order, p[:, None], 1) for p in (some.pairs, pairs[given]))
    legal = (values >= 0)[some.rows] & (order != mine)
    legal &= values[some.rows] < some.positions[:, None]
    beside = legal & (np.abs(order - mine) == 1)
    by_chance = (beside.sum(1) / legal.sum(1)).mean()
    return (np.abs(theirs - mine) == 1)[:, 0], float(by_chance)


@dataclass(frozen=True)
class Reader:
    """The SSD head that weights right values most, relative to other pairs' values.

    Attributes:
        contrast: mean |M| from queries to their value, divided by mean |M| to another pair's value.
    """

    layer: int
    head: int
    contrast: float


@torch.no_grad()
def detect_masked(
    model: LanguageModel, batch: Batch, questions: Questions
) -> Bool[np.ndarray, " w"]:
    """Return whether the mask of some layer hides the key or value from all its heads."""
    hidden, layers = np.zeros(len(questions), bool), find_masked_layers(model)

    def look(bias: Tensor, point: HookPoint) -> None:
        layer = layers[int(point.name.split(".")[1])]
        first = find_onsets(bias[:, :, 0], layer.window).cpu().numpy()
        for source in (questions.keys, questions.values):
            since = first[questions.rows, :, np.maximum(source, 0)]
            masked = (since <= questions.positions[:, None]).all(1)
            hidden[:] |= masked & (source >= 0)

    if layers and has_pairs(batch):
        with model.hooks([(name_mask_points(layers), look)]):
            score(model, batch, "fp32")
    return hidden


@torch.no_grad()
def answer_unmasked(model: LanguageModel, batch: Batch) -> Int[Tensor, " q"]:
    """Return the answers at scored positions when no mask hides a stored key or value.

    Stored keys and values get the largest bias of the row. Windows grow by as many keys as a row
    stores, so that they still keep everything they kept before.
    """
    stored, layers = find_stored_positions(batch), find_masked_layers(model)
    windows = {i: layer.window for i, layer in layers.items() if layer.window is not None}

    def lift(bias: Tensor, point: HookPoint) -> Tensor:
        largest = bias.amax(-1, keepdim=True)
        # A window prefers the later of equal biases, so these are larger by the smallest amount.
        above = torch.nextafter(largest, torch.full_like(largest, math.inf))
        return torch.where(stored[:, None, None], above, bias)

    try:
        for i, window in windows.items():
            layers[i].window = window + int(stored.sum(1).max())
        with model.hooks([(name_mask_points(layers), lift)]):
            return scored(model, batch).answers
    finally:
        for i, window in windows.items():
            layers[i].window = window


@torch.no_grad()
def detect_decayed(
    model: LanguageModel,
    batch: Batch,
    everyone: Questions,
    placebo: Int[np.ndarray, " q"],
    wrong: Questions,
    rivals: Int[np.ndarray, "n w"],
) -> tuple[Reader | None, Bool[np.ndarray, "n w"]]:
    """Return whether decay alone ranks a rival above the right value, in the best SSD reader.

        |M_t,value| < |M_t,rival| although |C_t·B_value| dt_value ≥ |C_t·B_rival| dt_rival

    Args:
        model: any.
        batch: rows with pairs.
        everyone: all scored positions; the reader is chosen on them.
        placebo: for each of them the position of another pair's value, −1 for none.
        wrong: the errors.
        rivals: n sets of positions that hold the wrong answer, −1 for none.
    """
    mixers = {
        f"blocks.{i}.mixer.hook_": block.mixer
        for i, block in enumerate(model.list_blocks())
        if isinstance(block.mixer, SSD)
    }
    readers: list[tuple[Reader, Bool[np.ndarray, "n w"]]] = []
    known, seen = (everyone.values >= 0) & (placebo >= 0), dict[str, Tensor]()

    def look(tensor: Tensor, point: HookPoint) -> None:
        place, _, name = point.name.rpartition("hook_")
        seen[name] = tensor
        if name != "C_rot":
            return
        groups = mixers[f"{place}hook_"].group_of_head
        seen["total"] = seen["log_decay"].double().cumsum(1)
        on_value, on_other = (
            split_entries(seen, groups, everyone[known], sources[known]).prod(0).mean(0)
            for sources in (everyone.values, placebo)
        )
        contrast = on_value / np.maximum(on_other, np.finfo(np.float64).tiny)
        head = int(contrast.argmax())
        mine = split_entries(seen, groups, wrong, wrong.values)[..., head]
        flips = []
        for rival in rivals:
            theirs = split_entries(seen, groups, wrong, rival)[..., head]
            below = (mine.prod(0) < theirs.prod(0)) & (mine[0] >= theirs[0])
            flips.append(below & (wrong.values >= 0) & (rival >= 0))
        reader = Reader(int(point.name.split(".")[1]), head, float(contrast[head]))
        readers.append((reader, np.stack(flips)))
        seen.clear()

    if mixers and known.any():
        parts = ("dt", "log_decay", "B_rot", "C_rot")
        with model.hooks([([place + part for place in mixers for part in parts], look)]):
            score(model, batch, "fp32")
        reader, flips = max(readers, key=lambda found: found[0].contrast)
        if reader.contrast >= READS:
            return reader, flips
    return None, np.zeros(rivals.shape, bool)


def split_entries(
    seen: dict[str, Tensor],
    groups: Int[Tensor, " h"],
    questions: Questions,
    sources: Int[np.ndarray, " w"],
) -> Float[np.ndarray, "two w h"]:
    """Return entries of an SSD mixer's matrix, without D, as |C·B| dt and the decay exp Σ a.

    Args:
        seen: tensors that passed the mixer's hook points, and the total of the log-decay.
        groups: the group of each head.
        questions: the entries' target positions.
        sources: their source positions.
    """
    B, C, dt, total = (seen[name] for name in ("B_rot", "C_rot", "dt", "total"))
    rows, targets, source = (
        torch.from_numpy(part).to(B.device)
        for part in (questions.rows, questions.positions, np.maximum(sources, 0))
    )
    raw = (C[rows, targets] * B[rows, source]).sum(-1).abs().double()
    size = raw[:, groups.to(raw.device)] * dt[rows, source]
    decay = (total[rows, targets] - total[rows, source]).exp()
    return torch.stack([size, decay]).cpu().numpy()

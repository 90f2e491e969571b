"""Quantities that are followed over training, measured on one step's weights.

A `Found` holds each quantity by layer and head, on the rows themselves and on resamples of them.

Axis letters of this file, besides the package's: r resample of the rows, the rows themselves first.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from analysis.base import Subject
from analysis.links import find_links, has_pairs
from analysis.mixing import Mixer
from analysis.scoring import Scored
from analysis.statistics.distributions import effective_number
from lab.layers.mixer import offers_rows
from tasks.base import Batch

STRETCHES, STRETCH = 4, 128
"""Number and length of the stretches of target positions that stand for a longer row."""
MASKED_AT = -10.0
"""Mask biases are clamped here, where the weight of a key is below 5·10⁻⁵ anyway."""


@dataclass(frozen=True)
class Quantity:
    """A quantity that is followed.

    Attributes:
        name: in a few words.
        axis: what is drawn of it, or its unit.
        unit: "share", "nats" or "number".
        level: turns values into what is searched for changes, in shares of 1 or in nats.
        dated: name of what is searched for changes; the quantity's own where that is the same.
    """

    name: str
    axis: str
    unit: str
    level: Callable[[np.ndarray], np.ndarray] = np.asarray
    dated: str = ""


LOSS = Quantity("loss", "nats", "nats", lambda loss: np.exp(-loss), "e^−loss")
ACCURACY = Quantity("accuracy", "share of answers", "share")
KEYS = Quantity("value → key mass", "mass of values on their keys", "share")
BEFORE = Quantity("previous-token score", "mass on the token before", "share")
RECALL = Quantity("query → value mass", "mass of queries on their values", "share")
EXPERTS = Quantity("expert entropy", "effective experts", "number", np.log)
VALUES = Quantity("value entropy", "effective values", "number", np.log)
MASK = Quantity("mask drift", "nats", "nats")
QUANTITIES = (LOSS, ACCURACY, KEYS, BEFORE, RECALL, EXPERTS, VALUES, MASK)


Key = tuple[Quantity, int | None]
Found = dict[Key, Float[np.ndarray, "r heads"]]
"""The quantities of one step by layer."""
Biases = dict[int, Float[np.ndarray, "b h s"]]


def measure_scores(answers: Scored, draws: Float[np.ndarray, "r rows"]) -> Found:
    """Measure loss and accuracy."""
    rows, size = answers.rows.cpu().numpy(), draws.shape[1]
    counts = np.bincount(rows, minlength=size)
    return {
        (quantity, None): _average(
            draws, np.bincount(rows, values.double().cpu().numpy(), size)[:, None], counts
        )
        for quantity, values in ((LOSS, answers.losses), (ACCURACY, answers.right))
    }


def measure_choices(seen: dict[str, Tensor], draws: Float[np.ndarray, "r rows"]) -> Found:
    """Measure how many experts and values are effectively in use."""
    found: Found = {}
    for name, indices in seen.items():
        if name.endswith("hook_dynamic_mask"):
            continue
        used, items = np.unique(indices.flatten(1).cpu().numpy(), return_inverse=True)
        items = items.reshape(len(indices), -1)
        counts = np.stack([np.bincount(row, minlength=len(used)) for row in items])
        quantity = EXPERTS if name.endswith("hook_expert_indices") else VALUES
        found[quantity, _parse_layer(name)] = effective_number(draws @ counts)[:, None]
    return found


def clamp_biases(seen: dict[str, Tensor]) -> Biases:
    """Return the biases of the masks by layer, no lower than `MASKED_AT`."""
    return {
        _parse_layer(name): bias[:, :, 0].clamp_min(MASKED_AT).double().cpu().numpy()
        for name, bias in seen.items()
        if name.endswith("hook_dynamic_mask")
    }


def measure_drifts(biases: Biases, first: Biases, draws: Float[np.ndarray, "r rows"]) -> Found:
    """Measure how far the biases of the masks are from the first ones."""
    found: Found = {}
    for layer, bias in biases.items():
        squares = ((bias - first[layer]) ** 2).mean((1, 2))[:, None]
        found[MASK, layer] = np.sqrt(_average(draws, squares, np.ones(len(squares))))
    return found


def _parse_layer(name: str) -> int:
    return int(name.split(".")[1])


def measure_masses(mixer: Mixer, batch: Batch, draws: Float[np.ndarray, "r rows"]) -> Found:
    """Measure where the mass of a mixer's matrix lies, at target positions all over the rows."""
    sums: dict[Quantity, list[np.ndarray]] = {}
    counts: dict[Quantity, list[int]] = {}
    seq_len = batch.inputs.shape[1]
    for row in range(len(batch.inputs)):
        links = find_links(batch, row)
        later = np.arange(1, seq_len)
        cells = {BEFORE: (later, later - 1)}
        if has_pairs(batch):
            cells = {KEYS: (links.values, links.keys), RECALL: (links.queries, links.values)}
        parts: dict[Quantity, list[np.ndarray]] = {quantity: [] for quantity in cells}
        for stretch in choose_stretches(mixer, seq_len):
            size = mixer.matrix(row, stretch).abs()
            share = size / size.sum(-1, keepdim=True).clamp_min(torch.finfo(size.dtype).tiny)
            share = share.double().cpu().numpy()
            for quantity, (targets, sources) in cells.items():
                inside = (targets >= stretch.start) & (targets < stretch.stop)
                parts[quantity].append(share[:, targets[inside] - stretch.start, sources[inside]])
        for quantity, found in parts.items():
            shares = np.concatenate(found, axis=-1)
            sums.setdefault(quantity, []).append(shares.sum(-1))
            counts.setdefault(quantity, []).append(shares.shape[-1])
    return {
        (quantity, mixer.layer): _average(
            draws, np.stack(sums[quantity]), np.array(counts[quantity])
        )
        for quantity in sums
        if sum(counts[quantity])
    }


def choose_stretches(mixer: Mixer, seq_len: int) -> list[slice]:
    """Choose target positions: all of a short row, stretches of a long one.

    Mixers that cannot compute a part of their matrix compute all of it.
    """
    if not offers_rows(mixer.module) or seq_len <= STRETCHES * STRETCH:
        return [slice(0, seq_len)]
    middles = [(2 * i + 1) * seq_len // (2 * STRETCHES) for i in range(STRETCHES)]
    return [slice(middle - STRETCH // 2, middle + STRETCH // 2) for middle in middles]


def _average(
    draws: Float[np.ndarray, "r rows"],
    sums: Float[np.ndarray, "rows h"],
    counts: np.ndarray,
) -> Float[np.ndarray, "r h"]:
    """Return the mean over positions on each resample of the rows."""
    return (draws @ sums) / np.maximum(draws @ counts, 1)[:, None]


def compute_nulls(subject: Subject, batch: Batch) -> dict[Quantity, float]:
    """Compute what quantities are without learning: for a uniform guess, or a uniform row."""
    size = subject.task.vocab_size
    nulls = {LOSS: float(np.log(size)), ACCURACY: subject.task.chance}
    links = [find_links(batch, row) for row in range(len(batch.inputs))]
    later = np.arange(1, batch.inputs.shape[1])
    for quantity, targets in (
        (KEYS, np.concatenate([link.values for link in links])),
        (BEFORE, later),
        (RECALL, np.concatenate([link.queries for link in links])),
    ):
        if targets.size:
            nulls[quantity] = float((1 / (targets + 1)).mean())
    return nulls

"""Quantities that are followed over a run's kept weights, on the same few rows at every step."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.base import Subject
from analysis.links import find_links, has_pairs
from analysis.mixing import Mixer, collect_mixers
from analysis.record import figure_only
from analysis.scoring import Scored, scored
from analysis.statistics.distributions import effective_number
from lab.hooks import HookPoint, hook_points
from lab.laws import MatrixMixer
from lab.layers.attention import Attention
from lab.layers.ssd import SSD
from lab.models import LanguageModel
from lab.training.runs import Run
from tasks.base import Batch

MOST_STEPS = 32
"""Steps that are looked at; of more kept ones those that tell most."""
MOST_ROWS, FEWEST_ROWS, TOKENS = 16, 2, 4096
"""Rows that are looked at at each step: about so many tokens' worth."""
STRETCHES, STRETCH = 4, 128
"""How many stretches of target positions are looked at in a longer row's matrix, and how long."""
RESAMPLES = 200
"""Draws of as many rows, with replacement; the same draws at every step."""
MASKED_AT = -10.0
"""A bias that masks: the key's weight is below 5·10⁻⁵, and how far below makes no difference."""


@dataclass(frozen=True)
class Quantity:
    """What is followed.

    Attributes:
        name: in a few words.
        axis: what is drawn of it, or its unit.
        unit: "share", "nats" or "number".
        level: what is looked at for changes, in shares of 1 or in nats.
    """

    name: str
    axis: str
    unit: str
    level: Callable[[np.ndarray], np.ndarray] = np.asarray


LOSS = Quantity("loss", "nats", "nats", lambda loss: np.exp(-loss))
ACCURACY = Quantity("accuracy", "share of answers", "share")
PREVIOUS = Quantity("previous-token score", "value → key mass", "share")
BEFORE = Quantity("previous-token score", "mass on the token before", "share")
RECALL = Quantity("KV mass", "query → value mass", "share")
EXPERTS = Quantity("expert entropy", "effective experts", "number", np.log)
VALUES = Quantity("value entropy", "effective values", "number", np.log)
MASK = Quantity("mask drift", "nats", "nats")
QUANTITIES = (LOSS, ACCURACY, PREVIOUS, BEFORE, RECALL, EXPERTS, VALUES, MASK)


@dataclass(frozen=True)
class Series:
    """A quantity by training step.

    Attributes:
        quantity: its name.
        axis: what is drawn of it, or its unit.
        unit: "share" in [0, 1], "nats" ≥ 0 or "number" ≥ 1.
        layer: the block; None for the model as a whole.
        head: the head with most of it at the last step; None where heads are taken together.
        values: the quantity at each step.
        null: what it is without learning, if that is known.
        null_name: of what: "chance", or a "uniform" guess or row.
        levels: what is looked at for changes: e^−loss, the geometric mean of the right answers'
            probabilities, for the loss; log for effective numbers; the quantity itself otherwise.
        resampled: levels on rows drawn again.
    """

    quantity: str
    axis: str
    unit: str
    layer: int | None
    head: int | None
    values: Float[np.ndarray, " n"]
    null: float | None
    null_name: str
    levels: Float[np.ndarray, " n"] = figure_only()
    resampled: Float[np.ndarray, "r n"] = figure_only()


Key = tuple[Quantity, int | None]
Found = dict[Key, Float[np.ndarray, "r heads"]]
"""A step's quantities by layer, on the rows and on each draw of them, head by head."""
Biases = dict[int, Float[np.ndarray, "b h s"]]


def few_rows(subject: Subject) -> Batch:
    """Return the first of the subject's rows, few enough to be looked at at every step."""
    batch = subject.batch
    fit = max(FEWEST_ROWS, TOKENS // batch.inputs.shape[1])
    return batch[: min(MOST_ROWS, fit)]


@torch.no_grad()
def follow(subject: Subject, batch: Batch, steps: Int[np.ndarray, " n"]) -> list[Series]:
    """Return the quantities that apply, layer by layer, at steps of the subject's run.

    The loss is the mean cross-entropy and the accuracy the share of right answers. The
    previous-token score is the share of a value row's mass |M_ij| on its key; of every row's on
    the token before where a task links no pairs. The KV mass is that of a query row on the value
    it asks for. Effective experts and values are e^H of how often each is chosen. The mask's
    drift is the root mean square of bias_t − bias_0 over keys, both no lower than `MASKED_AT`.
    Masses of long rows are read off `stretches` of their target positions.

    Raises:
        RunError: when weights cannot be read.
    """
    run = subject.run
    assert run is not None
    draws = _draws(len(batch.inputs), np.random.default_rng(subject.seed))
    found: list[Found] = []
    first: Biases = {}
    for step in steps:
        model = run.weights(int(step)).to(batch.inputs.device)
        answers, seen = _look(model, batch)
        biases = _biases(seen)
        first = first or biases
        measured = _scores(answers, draws) | _choices(seen, draws) | _drifts(biases, first, draws)
        for mixer in collect_mixers(model, batch):
            if isinstance(mixer.module, MatrixMixer):
                measured |= _masses(mixer, batch, draws)
        found.append(measured)
    nulls = _nulls(subject, batch)
    return [_series(key, found, nulls.get(key[0])) for key in _ordered(found[-1])]


def chosen_steps(run: Run) -> Int[np.ndarray, " n"]:
    """Return the steps to look at: all kept ones, or `MOST_STEPS` of them.

    Those lie about evenly along the curve of the training accuracy over log₂(1 + step), both
    scaled to 1, and so are dense where the accuracy jumps.
    """
    steps = np.array(run.steps())
    if len(steps) <= MOST_STEPS:
        return steps
    rows = run.metrics()
    seen = np.array([0, *(row["step"] for row in rows)])
    accuracy = np.interp(steps, seen, [0.0, *(row["accuracy"] for row in rows)])
    position = np.log2(1.0 + steps) / np.log2(1.0 + steps[-1])
    length = np.abs(np.diff(position)) + np.abs(np.diff(accuracy)) / (np.ptp(accuracy) or 1.0)
    along = np.concatenate([[0.0], length.cumsum()])
    # One by one, the step whose neighbours lie nearest to each other is dropped.
    keep = list(range(len(steps)))
    while len(keep) > MOST_STEPS:
        gaps = along[keep[2:]] - along[keep[:-2]]
        del keep[1 + int(gaps.argmin())]
    return steps[keep]


def _draws(rows: int, rng: np.random.Generator) -> Float[np.ndarray, "r rows"]:
    """Return how often each row counts: once, then as drawn with replacement."""
    again = rng.multinomial(rows, np.full(rows, 1 / rows), size=RESAMPLES)
    return np.concatenate([np.ones((1, rows)), again])


def _look(model: LanguageModel, batch: Batch) -> tuple[Scored, dict[str, Tensor]]:
    """Run a model; return its answers, and its choices and mask biases by hook point."""
    seen: dict[str, Tensor] = {}

    def keep(tensor: Tensor, point: HookPoint) -> None:
        seen[point.name] = tensor

    # A hook on the point of a mask that a layer does not have would put one there.
    masks = {
        f"{name}.hook_dynamic_mask"
        for name, module in model.named_modules()
        if isinstance(module, Attention) and module.mask is not None
    }
    chosen = ("hook_expert_indices", "hook_value_indices")
    names = [name for name in hook_points(model) if name in masks or name.endswith(chosen)]
    with model.hooks([(names, keep)]):
        return scored(model, batch), seen


def _scores(answers: Scored, draws: Float[np.ndarray, "r rows"]) -> Found:
    """Measure loss and accuracy."""
    rows, size = answers.rows.cpu().numpy(), draws.shape[1]
    counts = np.bincount(rows, minlength=size)
    return {
        (quantity, None): _mean(
            draws, np.bincount(rows, values.double().cpu().numpy(), size)[:, None], counts
        )
        for quantity, values in ((LOSS, answers.losses), (ACCURACY, answers.right))
    }


def _choices(seen: dict[str, Tensor], draws: Float[np.ndarray, "r rows"]) -> Found:
    """Measure how many experts and values are in use."""
    found: Found = {}
    for name, indices in seen.items():
        if name.endswith("hook_dynamic_mask"):
            continue
        used, items = np.unique(indices.flatten(1).cpu().numpy(), return_inverse=True)
        items = items.reshape(len(indices), -1)
        counts = np.stack([np.bincount(row, minlength=len(used)) for row in items])
        quantity = EXPERTS if name.endswith("hook_expert_indices") else VALUES
        found[quantity, _layer(name)] = effective_number(draws @ counts)[:, None]
    return found


def _biases(seen: dict[str, Tensor]) -> Biases:
    """Return the masks' biases by layer, no lower than `MASKED_AT`."""
    return {
        _layer(name): bias[:, :, 0].clamp_min(MASKED_AT).double().cpu().numpy()
        for name, bias in seen.items()
        if name.endswith("hook_dynamic_mask")
    }


def _drifts(biases: Biases, first: Biases, draws: Float[np.ndarray, "r rows"]) -> Found:
    """Measure how far the masks' biases have come."""
    found: Found = {}
    for layer, bias in biases.items():
        squares = ((bias - first[layer]) ** 2).mean((1, 2))[:, None]
        found[MASK, layer] = np.sqrt(_mean(draws, squares, np.ones(len(squares))))
    return found


def _layer(name: str) -> int:
    return int(name.split(".")[1])


def _masses(mixer: Mixer, batch: Batch, draws: Float[np.ndarray, "r rows"]) -> Found:
    """Measure where a mixer's mass lies, at target positions from all over the rows."""
    sums: dict[Quantity, list[np.ndarray]] = {}
    counts: dict[Quantity, list[int]] = {}
    seq_len = batch.inputs.shape[1]
    for row in range(len(batch.inputs)):
        links = find_links(batch, row)
        later = np.arange(1, seq_len)
        cells = {BEFORE: (later, later - 1)}
        if has_pairs(batch):
            cells = {PREVIOUS: (links.values, links.keys), RECALL: (links.queries, links.values)}
        parts: dict[Quantity, list[np.ndarray]] = {quantity: [] for quantity in cells}
        for stretch in stretches(mixer, seq_len):
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
        (quantity, mixer.layer): _mean(draws, np.stack(sums[quantity]), np.array(counts[quantity]))
        for quantity in sums
        if sum(counts[quantity])
    }


def stretches(mixer: Mixer, seq_len: int) -> list[slice]:
    """Return the target positions to look at: all of a short row, parts of a long one.

    A mixer that can give no part of its matrix gives the whole.
    """
    partial = isinstance(mixer.module, Attention | SSD)
    if not partial or seq_len <= STRETCHES * STRETCH:
        return [slice(0, seq_len)]
    middles = [(2 * i + 1) * seq_len // (2 * STRETCHES) for i in range(STRETCHES)]
    return [slice(middle - STRETCH // 2, middle + STRETCH // 2) for middle in middles]


def _mean(
    draws: Float[np.ndarray, "r rows"],
    sums: Float[np.ndarray, "rows h"],
    counts: np.ndarray,
) -> Float[np.ndarray, "r h"]:
    """Return the mean over positions on each draw of the rows."""
    return (draws @ sums) / np.maximum(draws @ counts, 1)[:, None]


def _nulls(subject: Subject, batch: Batch) -> dict[Quantity, float]:
    """Return what quantities are without learning: of a uniform guess, or a uniform row."""
    size = subject.task.vocab_size
    nulls = {LOSS: float(np.log(size)), ACCURACY: subject.task.chance}
    links = [find_links(batch, row) for row in range(len(batch.inputs))]
    later = np.arange(1, batch.inputs.shape[1])
    for quantity, targets in (
        (PREVIOUS, np.concatenate([link.values for link in links])),
        (BEFORE, later),
        (RECALL, np.concatenate([link.queries for link in links])),
    ):
        if targets.size:
            nulls[quantity] = float((1 / (targets + 1)).mean())
    return nulls


def _ordered(found: Found) -> list[Key]:
    return sorted(found, key=lambda key: (QUANTITIES.index(key[0]), key[1] or 0))


def _series(key: Key, found: list[Found], null: float | None) -> Series:
    """Join the steps of a quantity: of the head that has most at the last."""
    quantity, layer = key
    head = int(found[-1][key][0].argmax())
    values = np.stack([step[key][:, head] for step in found], axis=-1)
    levels = quantity.level(values)
    return Series(
        quantity=quantity.name,
        axis=quantity.axis,
        unit=quantity.unit,
        layer=layer,
        head=head if found[-1][key].shape[1] > 1 else None,
        values=values[0],
        null=null,
        null_name="chance" if quantity == ACCURACY else "uniform",
        levels=levels[0],
        resampled=levels[1:],
    )

"""A run's quantities over its kept weights, on the same few rows at every step.

Axis letters of this file, besides the package's: r resample of the rows, the rows themselves first.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.base import Subject
from analysis.links import find_links, has_pairs
from analysis.mixing import BlockMixer, collect_mixers
from analysis.plain import figure_only
from analysis.scoring import scored
from analysis.statistics.distributions import effective_number
from lab.hooks import HookPoint, hook_points
from lab.layers.attention import Attention
from lab.layers.mixer import MatrixMixer
from lab.models import LanguageModel
from lab.training.run import Run
from tasks.base import Batch, count_rows

MOST_STEPS = 32
"""Maximum number of steps that are measured; of more kept ones, those around large changes."""
MOST_ROWS, FEWEST_ROWS, TOKENS = 16, 2, 4096
"""Maximum and minimum number of rows measured at each step, and about how many tokens."""
RESAMPLES = 200
"""How often the rows are resampled; the resamples are the same at every step."""
STRETCHES, STRETCH = 4, 128
"""Number and length of the stretches of target positions that stand for a longer row."""
MASKED_AT = -10.0
"""Mask biases are clamped here, where the weight of a key is below 5·10⁻⁵ anyway."""


@dataclass(frozen=True)
class Quantity:
    """A quantity that is followed.

    Attributes:
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
Draws = Float[np.ndarray, "r rows"]
"""How often each row counts."""
Found = dict[Key, Float[np.ndarray, "r heads"]]
"""The quantities of one step by layer, on the rows themselves and on resamples of them."""
Cells = dict[Quantity, tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]]
"""Target and source positions of a row between which a quantity is the mass."""


@dataclass(frozen=True)
class Series:
    """A quantity by training step.

    Attributes:
        axis: what is drawn of it, or its unit.
        unit: "share" in [0, 1], "nats" ≥ 0 or "number" ≥ 1.
        head: the head with most of it at the last step; None where heads are taken together.
        values: the quantity at each step.
        null: what it is without learning, if that is known.
        null_name: of what: "chance", or a "uniform" guess or row.
        levels: what is searched for changes: e^−loss, the geometric mean of the right answers'
            probabilities; the log of effective numbers; otherwise the quantity itself.
        resampled: levels on resampled rows.
        dated: name of the levels; empty where they are the quantity's own.
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
    dated: str = ""


def take_few_rows(subject: Subject) -> Batch:
    """Return the first of the subject's rows, few enough to be measured at every step."""
    batch = subject.batch
    fit = count_rows(TOKENS, batch.inputs.shape[1], fewest=FEWEST_ROWS)
    return batch[: min(MOST_ROWS, fit)]


def choose_steps(run: Run) -> Int[np.ndarray, " n"]:
    """Choose the steps to measure: all kept ones, or `MOST_STEPS` of them.

    They lie about evenly along the curve of the training accuracy over log₂(1 + step), both scaled
    to 1, so that they are dense where the accuracy jumps.
    """
    steps = np.array(run.list_steps())
    if len(steps) <= MOST_STEPS:
        return steps
    rows = run.read_metrics()
    seen = np.array([0, *(row["step"] for row in rows)])
    accuracy = np.interp(steps, seen, [0.0, *(row["accuracy"] for row in rows)])
    position = np.log2(1.0 + steps) / np.log2(1.0 + steps[-1])
    length = np.abs(np.diff(position)) + np.abs(np.diff(accuracy)) / (np.ptp(accuracy) or 1.0)
    along = np.concatenate([[0.0], length.cumsum()])
    # Drop, one by one, the step whose neighbours are nearest to each other.
    keep = list(range(len(steps)))
    while len(keep) > MOST_STEPS:
        gaps = along[keep[2:]] - along[keep[:-2]]
        del keep[1 + int(gaps.argmin())]
    return steps[keep]


@torch.no_grad()
def follow(subject: Subject, batch: Batch, steps: Int[np.ndarray, " n"]) -> list[Series]:
    """Measure the quantities that apply, layer by layer, at steps of the subject's run.

    The loss is the mean cross-entropy, the accuracy the share of right answers. The value → key
    mass is the share of the mass |M_ij| that values put on their keys. Without pairs, the
    previous-token score is the share that all positions put on the token before. The query → value
    mass is the share that queries put on the value they ask for. Effective experts and values are
    e^H of how often each is chosen. The mask drift is the root mean square of bias_t − bias_0 over
    keys, both clamped at `MASKED_AT`. Masses of long rows are measured at `choose_stretches` of
    their positions.

    Raises:
        RunError: when weights cannot be read.
    """
    run = subject.run
    assert run is not None
    draws = draw_rows(len(batch.inputs), np.random.default_rng(subject.seed))
    cells = _choose_cells(batch)
    found: list[Found] = []
    first: dict[str, np.ndarray] = {}
    for step in steps:
        model = run.load_model(int(step)).to(batch.inputs.device)
        found.append(_measure_hooks(model, batch, draws, first))
        for mixer in collect_mixers(model, batch):
            if isinstance(mixer.module, MatrixMixer):
                found[-1] |= _measure_masses(mixer, cells, batch.inputs.shape[1], draws)
    # Without learning: a uniform guess, and rows of the matrix that are uniform.
    nulls = {LOSS: float(np.log(subject.task.vocab_size)), ACCURACY: subject.task.chance}
    for quantity in cells[0]:
        targets = np.concatenate([row[quantity][0] for row in cells])
        nulls |= {quantity: float((1 / (targets + 1)).mean())} if targets.size else {}
    order = sorted(found[-1], key=lambda key: (QUANTITIES.index(key[0]), key[1] or 0))
    return [_join_steps(key, found, nulls.get(key[0])) for key in order]


def draw_rows(rows: int, rng: np.random.Generator) -> Draws:
    """Return how often each row counts: once, then as often as each resample draws it."""
    again = rng.multinomial(rows, np.full(rows, 1 / rows), size=RESAMPLES)
    return np.concatenate([np.ones((1, rows)), again])


def _measure_hooks(
    model: LanguageModel, batch: Batch, draws: Draws, first: dict[str, np.ndarray]
) -> Found:
    """Measure loss, accuracy, choices and mask drifts in one pass of the model.

    Args:
        first: the biases of the masks at the first step by hook point; filled in at that step.
    """
    seen: dict[str, Tensor] = {}

    def keep(tensor: Tensor, point: HookPoint) -> None:
        seen[point.name] = tensor

    # A hook on the mask of a layer without a mask would add one.
    masks = {
        f"{name}.hook_dynamic_mask"
        for name, module in model.named_modules()
        if isinstance(module, Attention) and module.mask is not None
    }
    chosen = ("hook_expert_indices", "hook_value_indices")
    names = [name for name in hook_points(model) if name in masks or name.endswith(chosen)]
    with model.hooks([(names, keep)]):
        answers = scored(model, batch)
    rows, size = answers.rows.cpu().numpy(), draws.shape[1]
    counts = np.bincount(rows, minlength=size)
    found: Found = {}
    for quantity, values in ((LOSS, answers.losses), (ACCURACY, answers.right)):
        sums = np.bincount(rows, values.double().cpu().numpy(), size)
        found[quantity, None] = _average(draws, sums[:, None], counts)
    for name, tensor in seen.items():
        layer = int(name.split(".")[1])
        if name in masks:
            bias = tensor[:, :, 0].clamp_min(MASKED_AT).double().cpu().numpy()
            squares = ((bias - first.setdefault(name, bias)) ** 2).mean((1, 2))[:, None]
            found[MASK, layer] = np.sqrt(_average(draws, squares, np.ones(size)))
        else:
            used, items = np.unique(tensor.flatten(1).cpu().numpy(), return_inverse=True)
            per_row = [np.bincount(row, minlength=len(used)) for row in items.reshape(size, -1)]
            quantity = EXPERTS if name.endswith("hook_expert_indices") else VALUES
            found[quantity, layer] = effective_number(draws @ np.stack(per_row))[:, None]
    return found


def _choose_cells(batch: Batch) -> list[Cells]:
    """Choose the entries of each row's matrix that the masses are sums of."""
    later = np.arange(1, batch.inputs.shape[1])
    if not has_pairs(batch):
        return [{BEFORE: (later, later - 1)}] * len(batch.inputs)
    links = [find_links(batch, row) for row in range(len(batch.inputs))]
    return [{KEYS: (row.values, row.keys), RECALL: (row.queries, row.values)} for row in links]


def _measure_masses(mixer: BlockMixer, cells: list[Cells], seq_len: int, draws: Draws) -> Found:
    """Measure where the mass of a mixer's matrix lies, at target positions all over the rows."""
    stretches = choose_stretches(mixer, seq_len)
    sums: dict[Quantity, list[np.ndarray]] = {quantity: [] for quantity in cells[0]}
    counts: dict[Quantity, list[int]] = {quantity: [] for quantity in cells[0]}
    for row, of_row in enumerate(cells):
        parts: dict[Quantity, list[np.ndarray]] = {quantity: [] for quantity in of_row}
        for stretch in stretches:
            size = mixer.matrix(row, stretch).abs()
            share = size / size.sum(-1, keepdim=True).clamp_min(torch.finfo(size.dtype).tiny)
            share = share.double().cpu().numpy()
            for quantity, (targets, sources) in of_row.items():
                inside = (targets >= stretch.start) & (targets < stretch.stop)
                parts[quantity].append(share[:, targets[inside] - stretch.start, sources[inside]])
        for quantity, found in parts.items():
            shares = np.concatenate(found, axis=-1)
            sums[quantity].append(shares.sum(-1))
            counts[quantity].append(shares.shape[-1])
    return {
        (quantity, mixer.layer): _average(draws, np.stack(sums[quantity]), np.array(count))
        for quantity, count in counts.items()
        if sum(count)
    }


def choose_stretches(mixer: BlockMixer, seq_len: int) -> list[slice]:
    """Choose target positions: all of a short row, stretches of a long one.

    Mixers that cannot compute a part of their matrix compute all of it.
    """
    if not mixer.module.takes_rows or seq_len <= STRETCHES * STRETCH:
        return [slice(0, seq_len)]
    middles = [(2 * i + 1) * seq_len // (2 * STRETCHES) for i in range(STRETCHES)]
    return [slice(middle - STRETCH // 2, middle + STRETCH // 2) for middle in middles]


def _average(
    draws: Draws, sums: Float[np.ndarray, "rows h"], counts: np.ndarray
) -> Float[np.ndarray, "r h"]:
    """Return the mean over positions on each resample of the rows."""
    return (draws @ sums) / np.maximum(draws @ counts, 1)[:, None]


def _join_steps(key: Key, found: list[Found], null: float | None) -> Series:
    """Join the steps of a quantity, for the head with most of it at the last step."""
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
        dated=quantity.dated,
    )

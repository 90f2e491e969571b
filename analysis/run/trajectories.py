"""A run's quantities over its kept weights, on the same few rows at every step."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.base import Subject
from analysis.mixing import collect_mixers
from analysis.plain import figure_only
from analysis.run.quantities import (
    ACCURACY,
    QUANTITIES,
    Biases,
    Found,
    Key,
    clamp_biases,
    compute_nulls,
    measure_choices,
    measure_drifts,
    measure_masses,
    measure_scores,
)
from analysis.scoring import Scored, scored
from lab.hooks import HookPoint, hook_points
from lab.laws import MatrixMixer
from lab.layers.attention import Attention
from lab.models import LanguageModel
from lab.training.run import Run
from tasks.base import Batch, count_rows

MOST_STEPS = 32
"""Maximum number of steps that are measured; of more kept ones, those around large changes."""
MOST_ROWS, FEWEST_ROWS, TOKENS = 16, 2, 4096
"""Maximum and minimum number of rows measured at each step, and about how many tokens."""
RESAMPLES = 200
"""How often the rows are resampled; the resamples are the same at every step."""


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
    found: list[Found] = []
    first: Biases = {}
    for step in steps:
        model = run.load_model(int(step)).to(batch.inputs.device)
        answers, seen = _record(model, batch)
        biases = clamp_biases(seen)
        first = first or biases
        measured = (
            measure_scores(answers, draws)
            | measure_choices(seen, draws)
            | measure_drifts(biases, first, draws)
        )
        for mixer in collect_mixers(model, batch):
            if isinstance(mixer.module, MatrixMixer):
                measured |= measure_masses(mixer, batch, draws)
        found.append(measured)
    nulls = compute_nulls(subject, batch)
    return [_join_steps(key, found, nulls.get(key[0])) for key in _sort_keys(found[-1])]


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


def draw_rows(rows: int, rng: np.random.Generator) -> Float[np.ndarray, "r rows"]:
    """Return how often each row counts: once, then as often as each resample draws it."""
    again = rng.multinomial(rows, np.full(rows, 1 / rows), size=RESAMPLES)
    return np.concatenate([np.ones((1, rows)), again])


def _record(model: LanguageModel, batch: Batch) -> tuple[Scored, dict[str, Tensor]]:
    """Run a model; return its answers, and its choices and mask biases by hook point."""
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
        return scored(model, batch), seen


def _sort_keys(found: Found) -> list[Key]:
    return sorted(found, key=lambda key: (QUANTITIES.index(key[0]), key[1] or 0))


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

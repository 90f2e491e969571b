"""How a dynamic mask came to be over training, and what it is where training did not reach."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from analysis.base import Subject
from analysis.dynamic_mask.masking import Table, auroc, masked_layers, reading, see
from analysis.links import has_pairs
from analysis.record import figure_only
from analysis.scoring import scored
from analysis.statistics.estimates import Estimate, estimate_accuracy, thin
from lab.hooks import HookPoint
from lab.layers.attention import Attention
from lab.models import LanguageModel
from lab.models.evaluation import find_stored_positions, score
from lab.ops.cross_entropy import linear_cross_entropy
from lab.training.runs import Run
from tasks.base import Batch

STEPS = 24
"""Most steps of a run that its history is drawn from."""
GRADIENT_TOKENS = 2**11
"""Tokens of the rows whose loss is differentiated at each of them."""
BEYOND_TOKENS = 2**13
"""Tokens of the rows that are twice as long as those trained on."""


@dataclass(frozen=True)
class History:
    """The masks over a run.

    Attributes:
        steps: at most `STEPS` of the run's, the first and the last among them.
        layers: index of the block, of each masked layer.
        n_heads: of each layer.
        readings: the mask's name, of each layer.
        tables: whether what each layer learns is a table of positions.
        values: of each step, head (layer by layer) and position: l of a table, else the mean bias.
        gradients: ‖∂loss/∂θ‖ of each step and layer, of the mean loss in nats; NaN for an oracle.
        drifts: ‖θ − θ₀‖, likewise.
    """

    steps: Int[np.ndarray, " steps"]
    layers: tuple[int, ...]
    n_heads: tuple[int, ...]
    readings: tuple[str, ...]
    tables: tuple[bool, ...]
    gradients: Float[np.ndarray, "steps layers"]
    drifts: Float[np.ndarray, "steps layers"]
    values: Float[np.ndarray, "steps heads t"] = figure_only()


@dataclass(frozen=True)
class Beyond:
    """What the masks are past the length they were trained on.

    Attributes:
        entries: table entries of a head past it; 0 where positions have no table.
        untouched: share of those that are exactly 1, as before training; NaN without any.
        weight: mean weight of such an entry beside the most favoured trained one's.
        seq_len: twice the length.
        accuracy: on rows of that length, by chance without the masks; None where not measured.
        auroc: of each head there, for stored keys; empty where not measured or without pairs.
        why: why nothing was measured there; empty where it was.
    """

    entries: int
    untouched: float
    weight: float
    seq_len: int
    accuracy: Estimate | None
    auroc: tuple[float, ...]
    why: str


def without_masks(model: LanguageModel, layers: Sequence[int]) -> AbstractContextManager[nn.Module]:
    """Set these layers' biases to zero for a `with` block; a window then keeps the latest keys."""

    def clear(bias: Tensor, point: HookPoint) -> Tensor:
        return torch.zeros_like(bias)

    return model.hooks([([f"blocks.{i}.mixer.hook_dynamic_mask" for i in layers], clear)])


def parameters(model: LanguageModel, layer: int) -> list[nn.Parameter]:
    """Return what a layer's mask learns: a table's l, a value mask's A and dt; nothing else."""
    mask = masked_layers(model)[layer].mask
    assert mask is not None
    return [p for _, p in sorted(mask.named_parameters())]


def learn(model: LanguageModel, batch: Batch) -> tuple[list[Float[np.ndarray, "h t"]], list[float]]:
    """Return each masked layer's values, as `History` has them, and ‖∂loss/∂θ‖ of its mask.

    The loss is the mean cross-entropy at scored positions of the batch's first rows. A mask that no
    gradient reaches has exactly 0, one without parameters NaN.
    """
    layers, seq_len = masked_layers(model), batch.inputs.shape[1]
    batch = batch[: max(1, GRADIENT_TOKENS // seq_len)]
    biases: dict[str, Tensor] = {}

    def keep(bias: Tensor, point: HookPoint) -> None:
        biases[point.name] = bias.detach()[:, :, 0].mean(0)

    names = [f"blocks.{i}.mixer.hook_dynamic_mask" for i in layers]
    learned = {i: parameters(model, i) for i in layers}
    flat = [p for of_layer in learned.values() for p in of_layer]
    with model.hooks([(names, keep)]), torch.enable_grad():
        hidden, head, targets = score(model, batch, "fp32")
        loss, _ = linear_cross_entropy(hidden, head, targets)
        grads = [None] * len(flat)
        if flat and loss.requires_grad:
            grads = list(torch.autograd.grad(loss, flat, allow_unused=True))
    sizes, values = [], []
    for name, (i, module) in zip(names, layers.items(), strict=True):
        own, grads = grads[: len(learned[i])], grads[len(learned[i]) :]
        squares = sum(float(g.double().square().sum()) for g in own if g is not None)
        sizes.append(squares**0.5 if learned[i] else math.nan)
        table = module.mask.l.detach() if isinstance(module.mask, Table) else biases[name]
        values.append(table[:, :seq_len].float().cpu().numpy())
    return values, sizes


def history(run: Run, batch: Batch) -> History:
    """Follow a run's masks over at most `STEPS` of its steps, on rows of the batch."""
    steps = thin(run.steps(), STEPS)
    batch = batch.to("cpu")
    start: list[Float[Tensor, " n"]] = []
    values, gradients, drifts = [], [], []
    layers: dict[int, Attention] = {}
    for step in steps:
        model = run.weights(step)
        layers = masked_layers(model)
        now = [_flat(parameters(model, i)) for i in layers]
        start = start or now
        of_layers, sizes = learn(model, batch)
        values.append(np.concatenate(of_layers))
        gradients.append(sizes)
        drifts.append(
            [
                float((new - old).norm()) if len(new) else math.nan
                for new, old in zip(now, start, strict=True)
            ]
        )
    return History(
        steps=np.array(steps),
        layers=tuple(layers),
        n_heads=tuple(module.n_kv_heads for module in layers.values()),
        readings=tuple(reading(module) for module in layers.values()),
        tables=tuple(isinstance(module.mask, Table) for module in layers.values()),
        gradients=np.array(gradients),
        drifts=np.array(drifts),
        values=np.stack(values),
    )


def _flat(parameters: Sequence[nn.Parameter]) -> Float[Tensor, " n"]:
    parts = [p.detach().double().flatten() for p in parameters]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def beyond(subject: Subject, rng: np.random.Generator) -> Beyond:
    """Look at the masks past the length of the subject's rows, and at rows of twice that length."""
    layers, seq_len = masked_layers(subject.model), subject.batch.inputs.shape[1]
    masks = [module.mask for module in layers.values() if isinstance(module.mask, Table)]
    past = [mask.l.detach()[:, seq_len:].flatten().cpu().numpy() for mask in masks]
    weights = [
        (bias[:, seq_len:] - bias[:, :seq_len].amax(-1, keepdim=True)).exp().mean()
        for bias in (mask.bias(mask.l.detach()) for mask in masks)
        if bias.shape[1] > seq_len
    ]
    found = Beyond(
        entries=max(
            (len(table) // len(mask.l) for table, mask in zip(past, masks, strict=True)), default=0
        ),
        untouched=float(np.mean(np.concatenate(past) == 1)) if sum(map(len, past)) else math.nan,
        weight=float(torch.stack(weights).mean()) if weights else math.nan,
        seq_len=2 * seq_len,
        accuracy=None,
        auroc=(),
        why="",
    )
    short = [mask.l.shape[1] for mask in masks if mask.l.shape[1] < 2 * seq_len]
    if short:
        return replace(found, why=f"a table ends at {min(short)} positions")
    try:
        task = subject.task.changed(seq_len=2 * seq_len)
    except ValueError as error:
        return replace(found, why=str(error))
    size = max(1, min(len(subject.batch.inputs), BEYOND_TOKENS // (2 * seq_len)))
    device = subject.batch.inputs.device
    batch = task.batch(split="test", size=size, seed=subject.seed, device=device)
    answered = scored(subject.model, batch)
    with without_masks(subject.model, list(layers)):
        bare = scored(subject.model, batch)
    ranked = ()
    if has_pairs(batch):
        keep = find_stored_positions(batch)[:, None]
        ranked = tuple(
            float(r)
            for seen in see(subject.model, batch)
            for r in auroc(seen.bias, keep, ~keep).nanmean(0)
        )
    return replace(found, accuracy=estimate_accuracy(answered, bare.accuracy, rng), auroc=ranked)

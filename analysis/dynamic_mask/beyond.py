"""How the masks behave on rows longer than those that they were trained on."""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from analysis.base import Subject
from analysis.dynamic_mask.masks import (
    TableMask,
    auroc,
    disable_masks,
    find_masked_layers,
    record_masked_layers,
)
from analysis.links import has_pairs
from analysis.plots.panels import PANELS
from analysis.scoring import scored
from analysis.statistics.estimates import Estimate, estimate_accuracy
from analysis.words import percent
from lab.models.evaluation import find_stored_positions
from tasks.base import count_rows

BEYOND_TOKENS = 2**13
"""Number of tokens of the rows that are twice as long as those trained on."""


@dataclass(frozen=True)
class Beyond:
    """What the masks are past the length they were trained on.

    Attributes:
        entries: table entries per head past that length; 0 without tables.
        untouched: share of those that are exactly 1, as before training; NaN without any.
        weight: mean weight of such an entry relative to the most favoured trained one.
        seq_len: twice the length.
        accuracy: on rows of that length; chance: the same without the masks; None if not measured.
        auroc: of each head there, for stored keys; empty if not measured or without pairs.
        why: why nothing was measured there; empty if it was.
    """

    entries: int
    untouched: float
    weight: float
    seq_len: int
    accuracy: Estimate | None
    auroc: tuple[float, ...]
    why: str

    def summarize(self) -> str:
        """Summarize the untouched entries and the rows of twice the length."""
        text = ""
        if self.entries:
            text = (
                f"Of the {self.entries:,} table entries past these rows "
                f"{percent(self.untouched)} are untouched; their mean weight is "
                f"{self.weight:.2g} of that of the most favoured trained entry. "
            )
        if self.accuracy is None:
            return f"{text}Rows twice as long were not measured: {self.why}."
        text += (
            f"On rows of {self.seq_len:,} tokens {percent(self.accuracy.value)} of the answers are "
            f"right, {percent(self.accuracy.chance)} without masks"
        )
        if self.auroc:
            text += f"; AUROC there: {', '.join(f'{a:.2f}' for a in self.auroc[:PANELS])}"
        return f"{text}."


def measure_beyond(subject: Subject, rng: np.random.Generator) -> Beyond:
    """Measure the masks past the length of the subject's rows, and on rows of twice that length."""
    layers, seq_len = find_masked_layers(subject.model), subject.batch.inputs.shape[1]
    masks = [module.mask for module in layers.values() if isinstance(module.mask, TableMask)]
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
        task = subject.task.replace(seq_len=2 * seq_len)
    except ValueError as error:
        return replace(found, why=str(error))
    size = count_rows(BEYOND_TOKENS, 2 * seq_len, most=len(subject.batch.inputs))
    device = subject.batch.inputs.device
    batch = task.batch(split="test", size=size, seed=subject.seed, device=device)
    masked = scored(subject.model, batch)
    with disable_masks(subject.model, layers):
        bare = scored(subject.model, batch)
    ranked: tuple[float, ...] = ()
    if has_pairs(batch):
        stored = find_stored_positions(batch)[:, None]
        for layer in record_masked_layers(subject.model, batch):
            keep = stored.expand_as(layer.bias)
            ranked += tuple(auroc(layer.bias, keep, ~keep).nanmean(0).tolist())
    return replace(found, accuracy=estimate_accuracy(masked, bare.accuracy, rng), auroc=ranked)

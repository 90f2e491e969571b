"""Causes of errors inside the model: a dynamic mask hides the value, or decay weakens it.

Axis letter of this file, besides the package's: w wrong answer.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from analysis.dynamic_mask.masks import find_masked_layers, find_onsets, name_mask_points
from analysis.errors.causes import Questions
from analysis.links import has_pairs
from analysis.scoring import scored
from lab.hooks import HookPoint
from lab.layers.attention import Attention
from lab.layers.ssd import SSD
from lab.models import Block, LanguageModel
from lab.models.evaluation import find_stored_positions, score
from tasks.base import Batch

READS = 2.0
"""An SSD head is a reader if it weights right values this many times more than other values."""


@dataclass(frozen=True)
class Reader:
    """The SSD head that weights right values most, relative to other pairs' values.

    Attributes:
        layer: index of the block.
        head: of its mixer.
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
    hidden = np.zeros(len(questions), bool)

    def look(bias: Tensor, point: HookPoint) -> None:
        first = find_onsets(bias[:, :, 0], _find_layer(model, point).window).cpu().numpy()
        for source in (questions.keys, questions.values):
            hidden[:] |= is_hidden(first, questions, source)

    names = list_mask_hooks(model)
    if names and has_pairs(batch):
        with model.hooks([(names, look)]):
            score(model, batch, "fp32")
    return hidden


def is_hidden(
    first: Int[np.ndarray, "b h t"], questions: Questions, sources: Int[np.ndarray, " w"]
) -> Bool[np.ndarray, " w"]:
    """Return whether a source is masked for the query in every head, by `masking.find_onsets`."""
    since = first[questions.rows, :, np.maximum(sources, 0)]
    return (since <= questions.positions[:, None]).all(1) & (sources >= 0)


@torch.no_grad()
def answer_unmasked(model: LanguageModel, batch: Batch) -> Int[Tensor, " q"]:
    """Return the answers at scored positions when no mask hides a stored key or value.

    Stored keys and values get the largest bias of the row. Windows grow by as many keys as a row
    stores, so that they still keep everything they kept before.
    """
    stored = find_stored_positions(batch)
    more = int(stored.sum(1).max())
    wide = [layer for layer in find_masked_layers(model).values() if layer.window is not None]

    def lift(bias: Tensor, point: HookPoint) -> Tensor:
        largest = bias.amax(-1, keepdim=True)
        # A window prefers the later of equal biases, so these are larger by the smallest amount.
        above = torch.nextafter(largest, torch.full_like(largest, math.inf))
        return torch.where(stored[:, None, None], above, bias)

    with ExitStack() as stack:
        stack.enter_context(model.hooks([(list_mask_hooks(model), lift)]))
        for layer in wide:
            stack.enter_context(_widen_window(layer, more))
        return scored(model, batch).answers


@contextmanager
def _widen_window(layer: Attention, more: int) -> Iterator[None]:
    """Let the window of a layer keep `more` keys in addition for a `with` block."""
    window = layer.window
    assert window is not None
    layer.window = window + more
    try:
        yield
    finally:
        layer.window = window


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
    readers: list[tuple[float, int, int, Bool[np.ndarray, "n w"]]] = []
    seen: dict[str, Tensor] = {}

    def look(tensor: Tensor, point: HookPoint) -> None:
        layer, _, name = point.name.removeprefix("blocks.").partition(".mixer.hook_")
        seen[name] = tensor
        if name != "C_rot":
            return
        block = model.list_blocks()[int(layer)]
        assert isinstance(block.mixer, SSD)
        entries = MatrixEntries.from_hooks(block.mixer, seen)
        known = (everyone.values >= 0) & (placebo >= 0)
        on_value, on_other = (
            np.prod(entries.split(everyone[known], sources[known]), axis=0).mean(0)
            for sources in (everyone.values, placebo)
        )
        contrast = on_value / np.maximum(on_other, np.finfo(np.float64).tiny)
        head = int(contrast.argmax())
        mine = entries.split(wrong, wrong.values)[..., head]
        flips = []
        for rival in rivals:
            theirs = entries.split(wrong, rival)[..., head]
            below = (mine.prod(0) < theirs.prod(0)) & (mine[0] >= theirs[0])
            flips.append(below & (wrong.values >= 0) & (rival >= 0))
        readers.append((float(contrast[head]), int(layer), head, np.stack(flips)))
        seen.clear()

    names = [
        f"blocks.{i}.mixer.hook_{name}"
        for i, block in enumerate(model.blocks)
        if isinstance(block, Block) and isinstance(block.mixer, SSD)
        for name in ("dt", "log_decay", "B_rot", "C_rot")
    ]
    nobody = np.zeros(rivals.shape, bool)
    known = (everyone.values >= 0) & (placebo >= 0)
    if not names or not known.any():
        return None, nobody
    with model.hooks([(names, look)]):
        score(model, batch, "fp32")
    contrast, layer, head, flips = max(readers, key=lambda reader: reader[0])
    if contrast < READS:
        return None, nobody
    return Reader(layer, head, contrast), flips


@dataclass(frozen=True)
class MatrixEntries:
    """Single entries of an SSD mixer's matrix, without D."""

    C: Float[Tensor, "b t g n"]
    B: Float[Tensor, "b t g n"]
    dt: Float[Tensor, "b t h"]
    total: Float[Tensor, "b t h"]
    groups: Int[Tensor, " h"]

    @classmethod
    def from_hooks(cls, mixer: SSD, seen: dict[str, Tensor]) -> "MatrixEntries":
        """Read the factors of the entries from tensors that passed the mixer's hook points."""
        total = seen["log_decay"].double().cumsum(1)
        return cls(seen["C_rot"], seen["B_rot"], seen["dt"], total, mixer.group_of_head)

    def split(
        self, questions: Questions, sources: Int[np.ndarray, " w"]
    ) -> Float[np.ndarray, "two w h"]:
        """Return |C·B| dt and the decay exp Σ a from each source to its query, by head."""
        rows, targets, source = (
            torch.from_numpy(part).to(self.B.device)
            for part in (questions.rows, questions.positions, np.maximum(sources, 0))
        )
        raw = (self.C[rows, targets] * self.B[rows, source]).sum(-1).abs().double()
        size = raw[:, self.groups.to(raw.device)] * self.dt[rows, source]
        decay = (self.total[rows, targets] - self.total[rows, source]).exp()
        return torch.stack([size, decay]).cpu().numpy()


def list_mask_hooks(model: LanguageModel) -> list[str]:
    """Return the names of the hook points of the model's dynamic masks."""
    return name_mask_points(find_masked_layers(model))


def _find_layer(model: LanguageModel, point: HookPoint) -> Attention:
    """Return the layer that a hook point of a mask belongs to."""
    return find_masked_layers(model)[int(point.name.split(".")[1])]

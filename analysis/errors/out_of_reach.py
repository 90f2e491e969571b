"""Why an answer is out of reach: hidden by a dynamic mask, or below its rivals by decay.

Axis letter of this file, beside the package's: w wrong answer.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from analysis.dynamic_mask.masking import masked_layers, onset
from analysis.errors.causes import Asked
from analysis.links import has_pairs
from analysis.scoring import scored
from lab.hooks import HookPoint
from lab.layers.attention import Attention
from lab.layers.ssd import SSD
from lab.models import Block, LanguageModel
from lab.models.evaluation import find_stored_positions, score
from tasks.base import Batch

READS = 2.0
"""How much larger an SSD head's weights on the right value than on others make it a reader."""


@dataclass(frozen=True)
class Reader:
    """The SSD head that weights the right values most, beside other pairs' values.

    Attributes:
        layer: index of the block.
        head: of its mixer.
        contrast: mean |M| from queries to their value, over that to another pair's.
    """

    layer: int
    head: int
    contrast: float


@torch.no_grad()
def masked(model: LanguageModel, batch: Batch, asked: Asked) -> Bool[np.ndarray, " w"]:
    """Whether some layer's mask hides the key or value from every head (`masking.onset`)."""
    hidden = np.zeros(len(asked), bool)

    def look(bias: Tensor, point: HookPoint) -> None:
        first = onset(bias[:, :, 0], _attention(model, point).window).cpu().numpy()
        for source in (asked.keys, asked.values):
            hidden[:] |= out_of_sight(first, asked, source)

    names = masks(model)
    if names and has_pairs(batch):
        with model.hooks([(names, look)]):
            score(model, batch, "fp32")
    return hidden


def out_of_sight(
    first: Int[np.ndarray, "b h t"], asked: Asked, sources: Int[np.ndarray, " w"]
) -> Bool[np.ndarray, " w"]:
    """Whether a source is masked for a query in every head, by its onsets."""
    since = first[asked.rows, :, np.maximum(sources, 0)]
    return (since <= asked.positions[:, None]).all(1) & (sources >= 0)


@torch.no_grad()
def lifted(model: LanguageModel, batch: Batch) -> Int[Tensor, " q"]:
    """Return what is answered at scored positions once no mask hides a stored key or value.

    Their biases are the row's largest, and a window is wider by as many keys as a row stores, so
    that whatever was inside stays.
    """
    stored = find_stored_positions(batch)
    more = int(stored.sum(1).max())
    wide = [layer for layer in masked_layers(model).values() if layer.window is not None]

    def lift(bias: Tensor, point: HookPoint) -> Tensor:
        largest = bias.amax(-1, keepdim=True)
        # Of equal biases the later key is inside a window: these are larger by the least there is.
        above = torch.nextafter(largest, torch.full_like(largest, math.inf))
        return torch.where(stored[:, None, None], above, bias)

    with ExitStack() as stack:
        stack.enter_context(model.hooks([(masks(model), lift)]))
        for layer in wide:
            stack.enter_context(_widened(layer, more))
        return scored(model, batch).answers


@contextmanager
def _widened(layer: Attention, more: int) -> Iterator[None]:
    """Let a layer's window keep so many more keys for a `with` block."""
    window = layer.window
    assert window is not None
    layer.window = window + more
    try:
        yield
    finally:
        layer.window = window


@torch.no_grad()
def decayed(
    model: LanguageModel,
    batch: Batch,
    everyone: Asked,
    placebo: Int[np.ndarray, " q"],
    wrong: Asked,
    rivals: Int[np.ndarray, "n w"],
) -> tuple[Reader | None, Bool[np.ndarray, "n w"]]:
    """Whether decay alone puts a rival above the right value, in the SSD head that reads most.

        |M_t,value| < |M_t,rival| although |C_t·B_value| dt_value ≥ |C_t·B_rival| dt_rival

    Args:
        model: any.
        batch: rows with pairs.
        everyone: all scored positions, by which the reader is found.
        placebo: for each of them a position of another pair's value, −1 for none.
        wrong: the errors.
        rivals: positions that hold what was answered, −1 for none; n sets of them.
    """
    readers: list[tuple[float, int, int, Bool[np.ndarray, "n w"]]] = []
    seen: dict[str, Tensor] = {}

    def look(tensor: Tensor, point: HookPoint) -> None:
        layer, _, name = point.name.removeprefix("blocks.").partition(".mixer.hook_")
        seen[name] = tensor
        if name != "C_rot":
            return
        block = model.blocks[int(layer)]
        assert isinstance(block, Block)
        assert isinstance(block.mixer, SSD)
        edges = Weights.of(block.mixer, seen)
        known = (everyone.values >= 0) & (placebo >= 0)
        on_value, on_other = (
            np.prod(edges.at(everyone[known], sources[known]), axis=0).mean(0)
            for sources in (everyone.values, placebo)
        )
        contrast = on_value / np.maximum(on_other, np.finfo(np.float64).tiny)
        head = int(contrast.argmax())
        mine = edges.at(wrong, wrong.values)[..., head]
        flips = []
        for rival in rivals:
            theirs = edges.at(wrong, rival)[..., head]
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
class Weights:
    """Entries of an SSD mixer's matrix, without D, edge by edge."""

    C: Float[Tensor, "b t g n"]
    B: Float[Tensor, "b t g n"]
    dt: Float[Tensor, "b t h"]
    total: Float[Tensor, "b t h"]
    groups: Int[Tensor, " h"]

    @classmethod
    def of(cls, mixer: SSD, seen: dict[str, Tensor]) -> "Weights":
        """Read them off what passed a mixer's hooks."""
        total = seen["log_decay"].double().cumsum(1)
        return cls(seen["C_rot"], seen["B_rot"], seen["dt"], total, mixer.group_of_head)

    def at(self, asked: Asked, sources: Int[np.ndarray, " w"]) -> Float[np.ndarray, "two w h"]:
        """Return |C·B| dt and the decay exp Σ a, of each edge and head."""
        rows, targets, source = (
            torch.from_numpy(part).to(self.B.device)
            for part in (asked.rows, asked.positions, np.maximum(sources, 0))
        )
        raw = (self.C[rows, targets] * self.B[rows, source]).sum(-1).abs().double()
        size = raw[:, self.groups.to(raw.device)] * self.dt[rows, source]
        decay = (self.total[rows, targets] - self.total[rows, source]).exp()
        return torch.stack([size, decay]).cpu().numpy()


def masks(model: LanguageModel) -> list[str]:
    """Return the hook points of the model's dynamic masks."""
    return [f"blocks.{i}.mixer.hook_dynamic_mask" for i in masked_layers(model)]


def _attention(model: LanguageModel, point: HookPoint) -> Attention:
    """Return the layer that a mask's hook point belongs to."""
    return masked_layers(model)[int(point.name.split(".")[1])]

"""Compute only what is read: a model's last hidden states at the scored positions of a batch."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lab.hooks import is_watched
from lab.layers.mixer import offers_positions, take_positions
from lab.models.language_model import LanguageModel

FEW = 0.5
"""Share of a row's positions up to which computing them alone takes less time than all (LOG.md)."""


def read_hidden(
    model: LanguageModel, tokens: Int[Tensor, "b t"], places: "Places"
) -> Float[Tensor, "n d"]:
    """Return `model.hidden` at the n scored positions, row by row."""
    read = read_hidden_at(model, tokens, places.at, places.end)
    return read.flatten(0, 1).index_select(0, places.chosen)


class Places(NamedTuple):
    """Where the scored positions of a batch are.

    Attributes:
        at: of each row, as many positions as the row with most has, at least one; rows with fewer
            are padded with position 0, which is computed and then left out.
        chosen: the scored ones among them, as indices into `at`, flat, row by row.
        end: one more than the last position.
    """

    at: Int[Tensor, "b q"]
    chosen: Int[Tensor, " n"]
    end: int


def find_places(scored: Bool[Tensor, "b t"]) -> Places:
    """Return where the scored positions are."""
    rows, columns = scored.nonzero(as_tuple=True)
    if not len(rows):
        return Places(scored.new_zeros(len(scored), 1, dtype=torch.long), rows, 1)
    counts = scored.sum(1)
    most = int(counts.max())
    first = counts.cumsum(0) - counts
    slots = torch.arange(len(rows), device=rows.device) - first[rows]
    at = rows.new_zeros(len(scored), most)
    at[rows, slots] = columns
    return Places(at, rows * most + slots, int(columns.max()) + 1)


def find_even_places(scored: Bool[Tensor, "b t"], per_row: int) -> Places:
    """Return `per_row` positions of each row, scored ones first; nothing waits for a GPU."""
    at = scored.byte().argsort(dim=1, descending=True, stable=True)[:, :per_row]
    return Places(at, torch.arange(at.numel(), device=at.device), scored.shape[1])


def read_hidden_at(
    model: LanguageModel,
    tokens: Int[Tensor, "b t"],
    at: Int[Tensor, "b q"],
    end: int | None = None,
) -> Float[Tensor, "b q d"]:
    """Return `model.hidden` at some positions of each row, computing little else.

    Keys, values and states are computed everywhere. What only the output at a position needs, from
    the last mixer on, is computed at these positions alone where they are few (`FEW`). Nothing
    after the last of them is computed if every mixer says that it is causal, as
    `lab.layers.mixer.PositionsMixer`. Everything is computed where something sees it all: a hook,
    or in training dropout or batch normalisation, whose draws and statistics stay as they are.

    Args:
        model: the model.
        tokens: the rows.
        at: q ≥ 1 positions of each; a position may occur more than once.
        end: one more than the last of them, if known.
    """
    if is_watched(model) or any(sees_all(module) for module in model.modules()):
        return take_positions(model.hidden(tokens), at)
    blocks = list(model.blocks)
    mixing = [i for i, block in enumerate(blocks) if block.mixer is not None]
    if all(offers_positions(blocks[i].mixer) for i in mixing):
        tokens = tokens[:, : int(at.max()) + 1 if end is None else end]
    if at.shape[1] > FEW * tokens.shape[1]:
        return take_positions(model.hidden(tokens), at)
    last = mixing[-1] if mixing else 0
    x = model.embed(tokens)
    for i, block in enumerate(blocks):
        x = block(x, at) if i == last else block(x)
    return model.norm_final(x)


def sees_all(module: nn.Module) -> bool:
    """Whether what a module does at one position may depend on which others there are."""
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    return module.training and isinstance(module, kinds)

"""Compute only what is read: a model's last hidden states at the scored positions of a batch."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lab.hooks import is_watched
from lab.layers.mixer import offers_positions, take_positions
from lab.models.language_model import LanguageModel

FEW = 0.5
"""Share of a row's positions up to which computing them alone takes less time than all (LOG.md)."""


def read_hidden(
    model: LanguageModel, tokens: Int[Tensor, "b t"], scored: Bool[Tensor, "b t"]
) -> Float[Tensor, "n d"]:
    """Return `model.hidden` at the n scored positions, row by row."""
    rows, columns = scored.nonzero(as_tuple=True)
    counts = scored.sum(1)
    most = int(counts.max()) if len(rows) else 0
    if most == 0:
        return model.hidden(tokens)[rows, columns]
    # Rows with fewer positions are padded with position 0, which is computed and then left out.
    first = counts.cumsum(0) - counts
    slots = torch.arange(len(rows), device=rows.device) - first[rows]
    at = rows.new_zeros(len(tokens), most)
    at[rows, slots] = columns
    return read_hidden_at(model, tokens, at).flatten(0, 1).index_select(0, rows * most + slots)


def read_hidden_at(
    model: LanguageModel, tokens: Int[Tensor, "b t"], at: Int[Tensor, "b q"]
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
    """
    if is_watched(model) or any(_sees_all(module) for module in model.modules()):
        return take_positions(model.hidden(tokens), at)
    blocks = list(model.blocks)
    mixing = [i for i, block in enumerate(blocks) if block.mixer is not None]
    if all(offers_positions(blocks[i].mixer) for i in mixing):
        tokens = tokens[:, : int(at.max()) + 1]
    if at.shape[1] > FEW * tokens.shape[1]:
        return take_positions(model.hidden(tokens), at)
    last = mixing[-1] if mixing else 0
    x = model.embed(tokens)
    for i, block in enumerate(blocks):
        x = block(x, at) if i == last else block(x)
    return model.norm_final(x)


def _sees_all(module: nn.Module) -> bool:
    """Whether what a module does at one position may depend on which others there are."""
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    return module.training and isinstance(module, kinds)

"""Evaluate a model: its loss and accuracy at scored positions."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lab.hooks import is_watched
from lab.intervals import RowAmounts, RowCounts
from lab.layers.mask import has_oracle_mask, reveal_stored
from lab.layers.mixer import take_positions
from lab.models.language_model import Inputs, LanguageModel
from lab.models.vector_model import VectorModel
from lab.ops.cross_entropy import linear_answers
from tasks.base import Batch, Task, count_right
from tasks.one_thread import use_one_thread

FEW = 0.5
"""Share of a row's positions up to which computing them alone takes less time than all (LOG.md)."""


def read_hidden(model: LanguageModel, tokens: Inputs, places: "Places") -> Float[Tensor, "n d"]:
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
    tokens: Inputs,
    at: Int[Tensor, "b q"],
    end: int | None = None,
) -> Float[Tensor, "b q d"]:
    """Return `model.hidden` at some positions of each row, computing little else.

    Keys, values and states are computed everywhere. What only the output at a position needs, from
    the last mixer on, is computed at these positions alone where they are few (`FEW`). Nothing
    after the last of them is computed if every mixer promises to be causal
    (`lab.layers.mixer.Mixer.takes_positions`). Everything is computed where something sees it all:
    a hook, or in training dropout or batch normalisation, whose draws and statistics stay as they
    are.

    Args:
        model: the model.
        tokens: the rows.
        at: q ≥ 1 positions of each; a position may occur more than once.
        end: one more than the last of them, if known.
    """
    if is_watched(model) or any(sees_all(module) for module in model.modules()):
        return take_positions(model.hidden(tokens), at)
    blocks: list[Any] = list(model.blocks)
    mixing = [i for i, block in enumerate(blocks) if block.mixer is not None]
    if all(blocks[i].mixer.takes_positions for i in mixing):
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


GPU_TOKENS = 2**16
"""Tokens that a GPU evaluates at once: on fewer it waits for Python, more take its memory."""


@dataclass(frozen=True)
class Evaluation:
    """How a model does on rows of a task.

    Attributes:
        loss: mean cross-entropy at scored positions, nats; of a task of vectors the squared error.
        accuracy: share of scored positions answered right, in [0, 1]; of a task of vectors the
            explained variance (`tasks.vectors.VectorTask`).
        interval: 95 %, of the accuracy over other rows of the task.
        rows: how many were evaluated.
        scored: how many positions of them are scored.
    """

    loss: float
    accuracy: float
    interval: tuple[float, float]
    rows: int
    scored: int


@torch.no_grad()
def evaluate(
    task: Task,
    model: LanguageModel,
    *,
    rows: int,
    rows_at_once: int,
    seed: int,
    split: str = "test",
) -> Evaluation:
    """Return how a model does on the first rows of a split, in fp32.

    Args:
        task: whose rows they are.
        model: the model.
        rows: how many.
        rows_at_once: which a CPU evaluates at a time; a GPU more, as many as have `GPU_TOKENS`.
        seed: of the rows.
        split: of the rows.

    Raises:
        ValueError: for a task whose rows the model does not read.
    """
    check_sizes(task, model)
    device = next(model.parameters()).device
    if device.type == "cuda":
        rows_at_once = max(rows_at_once, GPU_TOKENS // task.seq_len)
    training = model.training
    model.eval()
    total, scored, counts = 0.0, 0, RowAmounts() if task.vectors else RowCounts()
    for start in range(0, rows, rows_at_once):
        size = min(rows_at_once, rows - start)
        batch = task.batch(split=split, start=start, size=size, seed=seed, device=device)
        loss, hits, asked = evaluate_batch(task, model, batch)
        total += loss
        scored += int(batch.scored.sum())
        counts.add(hits, asked)
    model.train(training)
    return Evaluation(
        loss=total / scored,
        accuracy=counts.share,
        interval=counts.find_interval(),
        rows=rows,
        scored=scored,
    )


@torch.no_grad()
def evaluate_batch(task: Task, model: LanguageModel, batch: Batch) -> tuple[float, Tensor, Tensor]:
    """Return the sum of the losses of a batch, and of each row what is right and what is asked.

    Losses are as in `Evaluation`; the amounts [b], on the CPU, as `Task.count_asked` counts them.
    """
    with use_one_thread(batch.roles.numel() * model.cfg.d_model):
        hidden, weight, targets = score(model, batch, "fp32")
        if task.vectors:
            found = hidden @ weight.T
            losses = (found - targets).square().mean(1)
        else:
            losses, found = linear_answers(hidden, weight, targets)
        answers = batch.targets.clone()
        answers[batch.scored] = found
        right = count_right(answers, batch.find_nearest(answers))
        asked = task.count_asked(batch)
        return losses.sum(dtype=torch.float64).item(), right.cpu(), asked.cpu()


def check_sizes(task: Task, model: LanguageModel) -> None:
    """Check that a model reads the rows of a task: all its tokens, or vectors as wide.

    Raises:
        ValueError: for a task with more tokens, or with other vectors, or with vectors where the
            model reads tokens, or the other way round.
    """
    if task.vectors != isinstance(model, VectorModel):
        rows, reads = ("vectors", "tokens") if task.vectors else ("tokens", "vectors")
        raise ValueError(f"{task.name} has rows of {rows}, the model reads {reads}")
    if isinstance(model, VectorModel):
        known = {"d_input": model.embed.in_features, "d_output": model.head.out_features}
        for name, size in task.sizes.items():
            if size != known[name]:
                raise ValueError(f"{name}={size} of the task must be {known[name]}, the model's")
        return
    known = model.embed.num_embeddings
    if task.vocab_size > known:
        raise ValueError(f"vocab_size={task.vocab_size} of the task must be ≤ {known}, the model's")


def score(
    model: LanguageModel, batch: Batch, precision: str, per_row: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the loss is made of: hidden states [q d], head [v d] and targets [q] or [q o].

    Only scored positions are there: of a row of hard MQAR, a quarter. What nothing else needs is
    computed there alone (`lab.models.evaluation`).

    Args:
        model: the model.
        batch: the rows.
        precision: "fp32" or "bf16".
        per_row: how many positions to take of each row; then nothing waits for a GPU. In rows that
            score fewer, others make up the number, with the target `IGNORE` or NaN; of more, the
            last are left out. None: what is scored and no more.
    """
    scored = batch.scored
    places = find_places(scored) if per_row is None else find_even_places(scored, per_row)
    with choose_autocast(batch.inputs.device, precision), tell_oracle_masks(model, batch):
        hidden = read_hidden(model, batch.inputs, places)
    weight = model.W_U.mT
    if precision == "bf16":
        hidden, weight = hidden.bfloat16(), weight.bfloat16()
    at, rest = places.at, batch.targets.shape[2:]
    at = at.reshape(*at.shape, *(1 for _ in rest)).expand(*at.shape, *rest)
    targets = batch.targets.gather(1, at).flatten(0, 1).index_select(0, places.chosen)
    return hidden, weight, targets


def find_stored_positions(batch: Batch) -> Tensor:
    """Return where the stored pairs are, bool [b t]: all that an oracle mask keeps.

    Raises:
        ValueError: for a task whose links name no pairs.
    """
    if not {"key_pos", "value_pos"} <= batch.links.keys():
        raise ValueError("mask=oracle: the task's links must name key_pos and value_pos")
    positions = torch.cat([batch.links["key_pos"], batch.links["value_pos"]], 1)
    # Padding, -1, lands in one more column that is cut off.
    (b, t), device = batch.inputs.shape, positions.device
    keep = torch.zeros(b, t + 1, dtype=torch.bool, device=device)
    return keep.scatter_(1, positions % (t + 1), True)[:, :-1]


def tell_oracle_masks(
    model: nn.Module, batch: Batch, rows: Tensor | slice = slice(None)
) -> AbstractContextManager[object]:
    """Tell a model's oracle masks what some rows of a batch store, for a `with` block.

    Nothing happens where the model has no such mask.

    Raises:
        ValueError: for an oracle mask and a task whose links name no pairs.
    """
    if not has_oracle_mask(model):
        return nullcontext()
    return reveal_stored(model, find_stored_positions(batch)[rows])


def choose_autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return the autocast of a precision, "fp32" or "bf16", for a `with` block."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)

"""Construct a model whose weights solve a task."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lab.config import ModelConfig
from lab.constructions import gather, heads, parity, questions, recall
from lab.constructions.cannot import CannotError, check_bits, count_arrangement_bits
from lab.constructions.codes import spread
from lab.constructions.residual import ANSWER_SIZE, Residual, read_answers, silence, write_tokens
from lab.layers.attention import Attention
from lab.layers.mask import has_oracle_mask
from lab.layers.ssd import SSD
from lab.models import LanguageModel, build
from tasks.base import Task
from tasks.copying import MARKER, Copy
from tasks.induction import TRIGGER, Induction
from tasks.mixture import Mixture
from tasks.mqar import MQAR
from tasks.word_problem import WordProblem


@torch.no_grad()
def construct(task: Task, config: ModelConfig, seed: int = 0) -> LanguageModel:
    """Return the configuration's model with weights that answer every scored position right.

    SSD without a convolution reads a sum: with more keys than channels, other writes now and then
    hide a right answer (`lab.constructions.match`).

    Layers that are not needed add exactly zero, by their last linear map alone. Their other weights
    stay random, so that there is gradient. The scale of the head makes the loss small, not zero.

    Args:
        task: one of `BUILT`.
        config: of the model; its masks stay open.
        seed: of the weights that are not set.

    Raises:
        CannotError: when this configuration cannot solve the task, or no construction is built.
        ValueError: for a task of another name, or a configuration that no model is of.
    """
    check_known(task)
    model = build(**config.to_dict(), vocab_size=task.vocab_size, seed=seed)
    set_by_hand(model, task)
    return model


def check_known(task: Task) -> None:
    """Check that there are constructions for a task.

    Raises:
        ValueError: for a task of another name.
    """
    if task.name not in BUILT:
        raise ValueError(f"task={task.name}: no construction is built, known: {', '.join(BUILT)}")


@torch.no_grad()
def set_by_hand(model: LanguageModel, task: Task) -> None:
    """Set the weights of a randomly initialised model, as `construct` does.

    Args:
        model: of the task's vocabulary.
        task: one of `BUILT`.

    Raises:
        CannotError: when this model cannot solve the task, or no construction is built.
    """
    _check_activations(model)
    silence(model)
    _check_oracle_mask(model, task)
    BUILT[task.name](model, task.parts if isinstance(task, Mixture) else (task,))


def _check_activations(model: LanguageModel) -> None:
    """Check that state space duality has the activation that its constructions count on."""
    for block in model.list_blocks():
        ssd = block.mixer
        if isinstance(ssd, SSD) and (ssd.activation == "silu") != (ssd.position == "conv"):
            raise CannotError(
                f"S.activation={ssd.activation}: no construction is built with "
                f"S.position={ssd.position}"
            )


def _check_oracle_mask(model: LanguageModel, task: Task) -> None:
    """Check that the task's links tell a mask "oracle" which keys to keep."""
    if has_oracle_mask(model) and not {"key_pos", "value_pos"} <= task.batch(size=1).links.keys():
        raise CannotError(
            f"mask=oracle: {task.name} stores no pairs that it could keep", proven=True
        )


def _mqar(model: LanguageModel, parts: Sequence[MQAR]) -> None:
    wanted = [
        questions.describe_mqar(p.seq_len, p.vocab_size, p.pair_count, p.fillers) for p in parts
    ]
    recall.solve(model, questions.combine(wanted))


def _induction(model: LanguageModel, parts: Sequence[Induction]) -> None:
    wanted = [questions.describe_induction(p.seq_len, p.vocab_size, TRIGGER) for p in parts]
    recall.solve(model, questions.combine(wanted))


def _copy(model: LanguageModel, parts: Sequence[Copy]) -> None:
    """Look back a fixed distance if there is one, else look up the token before.

    Raises:
        CannotError: when one token does not determine the place, or the key precedes the string.
    """
    lengths = {part.longest for part in parts} | {part.least for part in parts}
    modes = {part.mode for part in parts}
    if modes == {"copy"} and len(lengths) == 1:
        length = lengths.pop()
        bits = max(_count_bits(part) for part in parts)
        return _look_back(model, length, max(part.seq_len for part in parts), bits)
    if "prefix" in modes:
        raise CannotError(
            "mode=prefix: the marker must first find the key's end and then its place "
            "in the string, a gather more than two layers have; mode=copy or suffix would work"
        )
    if any(part.repeats for part in parts):
        part = parts[-1]
        share = 1 - (1 - 1 / (part.vocab_size - 1)) ** (part.longest - 1)
        raise CannotError(
            f"repeats=true with strings of {min(lengths)} … {max(lengths)} tokens: "
            f"{100 * share:.0f} % of the longest's tokens recur in it, and to distinguish them by "
            "n tokens takes n gathers; repeats=false, or shortest = longest, would work"
        )
    opens = "copy" in modes
    wanted = [
        questions.describe_string(p.seq_len, p.vocab_size, p.longest, MARKER, opens) for p in parts
    ]
    return recall.solve(model, questions.combine(wanted))


def _look_back(model: LanguageModel, length: int, seq_len: int, bits: float) -> None:
    """Let the last attention layer that can do so copy the token `length` positions earlier.

    Args:
        model: whose weights are set.
        length: tokens of every string.
        seq_len: T.
        bits: log₂ of how many strings there are.

    Raises:
        CannotError: when none singles that distance out, or there is only SSD.
    """
    mixers = [block.mixer for block in model.list_blocks()]
    attentions = [mixer for mixer in mixers if isinstance(mixer, Attention)]
    check_bits(model, bits, f"strings of {length} tokens")
    if not attentions:
        raise _refuse_delay(model, length)
    refusals = []
    for attention in reversed(attentions):
        try:
            return _bring(model, attention, length, seq_len)
        except CannotError as refusal:
            refusals.append(refusal)
    raise refusals[0]


def _bring(model: LanguageModel, attention: Attention, length: int, seq_len: int) -> None:
    v, d = model.embed.weight.shape
    width = min(v, d - 2, heads.count_room(attention))
    if width < 2:
        raise CannotError(f"d_model={d}: leaves {max(width, 0)} channels for {v} tokens")
    codes, channels = spread(v, width), slice(2, 2 + width)
    residual = Residual(
        d_model=d,
        kind=torch.zeros(v).double(),
        key=channels,
        gathered=channels,
        answer=channels,
        keys=codes,
        answers=codes,
    )
    gather.look_back(attention, residual, channels, channels, length, seq_len, ANSWER_SIZE)
    write_tokens(model, residual)
    read_answers(model, residual, ANSWER_SIZE - 1, residual.energy)


def _refuse_delay(model: LanguageModel, length: int) -> CannotError:
    """Return the refusal for a stack without attention."""
    ranks = [
        block.mixer.B_proj.out_features // block.mixer.n_groups * block.mixer.n_heads
        for block in model.list_blocks()
        if isinstance(block.mixer, SSD)
    ]
    return CannotError(
        f"to delay by {length} tokens takes a matrix of rank {length}, and one SSD has at most "
        f"{max(ranks)} = n_heads · d_state beyond its convolution; rotations of fixed "
        "wavelengths make no sharp delay; attention would work"
    )


def _count_bits(part: Copy) -> float:
    """Return log₂ of the number of strings of the greatest length."""
    symbols = part.vocab_size - 1
    if part.repeats:
        return part.longest * math.log2(symbols)
    return count_arrangement_bits(symbols, part.longest)


def _word_problem(model: LanguageModel, parts: Sequence[WordProblem]) -> None:
    parity.solve(model, {part.group for part in parts}, max(part.seq_len for part in parts))


BUILT: Mapping[str, Callable[[LanguageModel, Sequence[Any]], None]] = {
    "mqar": _mqar,
    "induction": _induction,
    "copy": _copy,
    "word_problem": _word_problem,
}
"""Task → function that sets the weights of a model so that it solves the parts of the task."""

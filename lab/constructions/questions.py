"""What a task of recall asks: which tokens are keys and answers, how many, and which one counts."""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int64
from torch import Tensor

from lab.constructions.cannot import CannotError, count_arrangement_bits


@dataclass(frozen=True)
class Recall:
    """What a row asks for, apart from any model.

    Attributes:
        key: number of each token among the keys, −1 for none, [v].
        answer: likewise among the answers.
        shared: whether keys and answers are the same tokens, under one code.
        seq_len: T.
        writes: as in `Lookup`.
        bits: log₂ of how many answers there may be to the same questions.
        earliest: as in `Lookup`.
        reach: as in `Lookup`.
        opening: the token that asks for the first of the row; None where none does.
    """

    key: Int64[Tensor, " v"]
    answer: Int64[Tensor, " v"]
    shared: bool
    seq_len: int
    writes: int
    bits: float
    earliest: str = "never"
    reach: int = 1
    opening: int | None = None

    @property
    def n_keys(self) -> int:
        """How many tokens are keys."""
        return int(self.key.max()) + 1

    @property
    def n_answers(self) -> int:
        """How many tokens are answers."""
        return int(self.answer.max()) + 1


def describe_mqar(seq_len: int, vocab_size: int, n_pairs: int, fillers: str) -> Recall:
    """Return what mqar asks: keys are the lower half, answers the upper.

    A filler that repeats a key is a decoy. If all slots hold queries, what follows it is a query,
    which is not an answer. In empty slots another filler that is an answer may follow it; then the
    earliest match is right.
    """
    half, token = vocab_size // 2, torch.arange(vocab_size)
    empty = 4 * n_pairs < seq_len
    decoys = fillers == "any" and empty
    writes = n_pairs - 1 + (0 if fillers == "zero" else (seq_len - 2 * n_pairs + 1) // 2)
    return Recall(
        key=token.where(token < half, -1),
        answer=(token - half).where(token >= half, -1),
        shared=False,
        seq_len=seq_len,
        writes=writes,
        bits=count_arrangement_bits(half, n_pairs),
        earliest="query" if decoys else "never",
        reach=seq_len,
    )


def describe_induction(seq_len: int, vocab_size: int, trigger: int) -> Recall:
    """Return what induction asks: the trigger is the only key, all other tokens are answers."""
    token = torch.arange(vocab_size)
    key = torch.full_like(token, -1)
    key[trigger] = 0
    return Recall(
        key=key,
        answer=torch.where(token < trigger, token, token - 1).where(token != trigger, -1),
        shared=False,
        seq_len=seq_len,
        writes=0,
        bits=math.log2(vocab_size - 1),
    )


def describe_string(
    seq_len: int, vocab_size: int, longest: int, marker: int, opens: bool
) -> Recall:
    """Return what copying asks if no token recurs: all tokens but the marker are keys and answers.

    Args:
        seq_len: T.
        vocab_size: V.
        longest: tokens of the longest string, which the row begins with.
        marker: the token that is neither.
        opens: whether the marker asks for the first token.
    """
    token = torch.arange(vocab_size)
    number = torch.where(token < marker, token, token - 1).where(token != marker, -1)
    return Recall(
        key=number,
        answer=number,
        shared=True,
        seq_len=seq_len,
        # A copy is written while it is answered, so that each pair then has twice the weight.
        writes=4 * longest if opens else 2 * longest,
        # In a lookup the key is the question, so only the answer to one key may differ.
        bits=count_arrangement_bits(vocab_size - 1, longest)
        if opens
        else math.log2(vocab_size - longest),
        earliest="kind" if opens else "never",
        reach=longest,
        opening=marker if opens else None,
    )


def combine(recalls: list[Recall]) -> Recall:
    """Return one description that covers rows of several settings.

    Raises:
        CannotError: when they disagree on which tokens are keys or answers.
    """
    first = recalls[0]
    for other in recalls[1:]:
        if not (torch.equal(first.key, other.key) and torch.equal(first.answer, other.answer)):
            raise CannotError(
                "the settings have several vocabularies, in which different tokens are keys"
            )
    order = ["never", "kind", "query"]
    return replace(
        first,
        seq_len=max(r.seq_len for r in recalls),
        writes=max(r.writes for r in recalls),
        bits=max(r.bits for r in recalls),
        earliest=max((r.earliest for r in recalls), key=order.index),
        reach=max(r.reach for r in recalls),
    )

"""The error ledger: every wrong answer goes to one cause, beside what chance would send there."""

import math
from dataclasses import dataclass
from itertools import chain, zip_longest

import numpy as np
import torch
from jaxtyping import Float, Int

from analysis.base import NotApplicableError, Subject
from analysis.errors import causes as why
from analysis.errors import out_of_reach as reach
from analysis.errors.causes import (
    CAUSES,
    DECAYED,
    DECOY,
    IN_ROW,
    MASKED,
    OTHER_PAIR,
    OUTRANKED,
    UNKNOWN,
    Asked,
)
from analysis.links import has_pairs
from analysis.scoring import PART_ENTRIES, Scored, scored
from lab.intervals import wilson
from lab.models import LanguageModel

TOP = 5
"""A right value that is among so many best ones was outranked, not unknown."""
REDRAWN = 8
"""Random answers that stand in for each wrong one, to see what chance attributes to a cause."""
EXAMPLES = 12


@dataclass(frozen=True)
class Cause:
    """A cause of errors.

    Attributes:
        name: one of `CAUSES`.
        count: errors that go to it.
        share: of all errors.
        interval: 95 % Wilson interval of the share, as if errors were independent.
        chance: the share that it would get if the wrong answers were other targets of the batch,
            drawn at random; of masks, if lifting them gave the value of a pair drawn at random.
            NaN for the last two causes, which the rank of the right value decides whatever was
            answered.
        distance: median tokens from the stored value to the query; NaN where unknown.
    """

    name: str
    count: int
    share: float
    interval: tuple[float, float]
    chance: float
    distance: float


@dataclass(frozen=True)
class Example:
    """An error.

    Attributes:
        row: of the test split.
        position: of the query.
        token: what stands there.
        right: the right answer.
        answered: the model's.
        cause: its name.
        rank: of the right answer among all tokens; 1 would be right.
        probability: that the model gives the right answer.
    """

    row: int
    position: int
    token: int
    right: int
    answered: int
    cause: str
    rank: int
    probability: float


@dataclass(frozen=True)
class Ledger:
    """All errors at scored positions of some rows.

    Attributes:
        rows: looked at.
        scored: positions.
        wrong: of them.
        interval: 95 % Wilson interval of the share that is wrong.
        causes: those that can be told on this task and model, in the order of precedence.
        pairs: whether the task says where keys and values are stored.
        neighbours: of answers that are another pair's value, the share from the pair stored next
            to the right one; NaN where there are none.
        neighbours_interval: its 95 % Wilson interval, as if errors were independent.
        by_chance: what that would be if all other pairs were as likely.
        masked: errors whose key or value a dynamic mask hides, lifting it helping or not.
        reader: the SSD head by which decay is judged; None where none reads.
        rank: median rank of the right answer where the answer is wrong.
    """

    rows: int
    scored: int
    wrong: int
    interval: tuple[float, float]
    causes: tuple[Cause, ...]
    pairs: bool
    neighbours: float
    neighbours_interval: tuple[float, float]
    by_chance: float
    masked: int
    reader: reach.Reader | None
    rank: float


@dataclass(frozen=True)
class Examples:
    """Up to `EXAMPLES` errors, of all causes in turn.

    Attributes:
        errors: the first of each cause, the second of each, and so on.
    """

    errors: tuple[Example, ...]


@torch.no_grad()
def measure_errors(subject: Subject) -> tuple[Ledger, Examples]:
    """Attribute a subject's errors.

    Raises:
        NotApplicableError: when no position is scored.
    """
    batch, model = subject.batch, subject.model
    rng = np.random.default_rng(subject.seed)
    found = scored(model, batch)
    everyone = why.asked(batch)
    if not len(everyone):
        raise NotApplicableError("no position is scored")
    wrong_at = np.flatnonzero(~found.right.cpu().numpy())
    wrong = everyone[wrong_at]
    inputs = batch.inputs.cpu().numpy()
    given = found.answers.cpu().numpy()[wrong_at]
    # Set 0 is what the model answered; the others are random.
    random = why.redrawn(wrong, everyone.targets, REDRAWN, rng)
    answers = np.concatenate([given[None], random])
    pairs = np.stack([why.other_pairs(batch, wrong, row) for row in answers])
    seen = np.stack([why.last_seen(inputs, wrong, row) for row in answers])
    hidden = reach.masked(model, batch, wrong)
    relieved = np.zeros(answers.shape, bool)
    if hidden.any():
        without = reach.lifted(model, batch).cpu().numpy()[wrong_at]
        others = [why.other_value(batch, wrong, rng) for _ in range(REDRAWN)]
        tokens = [np.where(at >= 0, inputs[wrong.rows, at], -1) for at in others]
        relieved = hidden & (without == np.stack([wrong.targets, *tokens]))
    reader, faded = None, np.zeros(answers.shape, bool)
    if has_pairs(batch) and len(wrong):
        stored = why.values_at(batch)[wrong.rows, np.maximum(pairs, 0)]
        rivals = np.where(pairs >= 0, stored, seen)
        placebo = why.other_value(batch, everyone, rng)
        reader, faded = reach.decayed(model, batch, everyone, placebo, wrong, rivals)
    rank, probability = _standing(found, wrong_at)
    cause = why.first_of(
        {
            DECOY: np.stack([why.follows_decoy(inputs, wrong, row) for row in answers]),
            MASKED: relieved,
            DECAYED: faded,
            OTHER_PAIR: pairs >= 0,
            IN_ROW: seen >= 0,
            OUTRANKED: np.broadcast_to(rank <= TOP, answers.shape),
            UNKNOWN: np.ones(answers.shape, bool),
        }
    )
    neighbours, by_chance = why.next_door(batch, wrong, pairs[0])
    tellable = _tellable(model, has_pairs(batch), reader) if len(wrong) else []
    ledger = Ledger(
        rows=len(inputs),
        scored=len(everyone),
        wrong=len(wrong),
        interval=wilson(len(wrong) / len(everyone), len(everyone)),
        causes=tuple(_cause(name, cause, wrong) for name in tellable),
        pairs=has_pairs(batch),
        neighbours=neighbours,
        neighbours_interval=wilson(neighbours, int((pairs[0] >= 0).sum()))
        if (pairs[0] >= 0).any()
        else (math.nan, math.nan),
        by_chance=by_chance,
        masked=int(hidden.sum()),
        reader=reader,
        rank=float(np.median(rank)) if len(rank) else math.nan,
    )
    examples = _examples(cause[0], wrong, inputs, given, rank, probability)
    return ledger, Examples(examples)


def _standing(
    found: Scored, at: Int[np.ndarray, " w"]
) -> tuple[Int[np.ndarray, " w"], Float[np.ndarray, " w"]]:
    """Return rank and probability of the right answers at some of the scored positions."""
    chosen = torch.from_numpy(at).to(found.hidden.device)
    ranks, probabilities = [np.zeros(0, np.int64)], [np.zeros(0)]
    for part in chosen.split(max(1, PART_ENTRIES // len(found.head))):
        logits = found.hidden[part] @ found.head.T
        right = logits.gather(1, found.targets[part, None])
        ranks.append((logits > right).sum(1).cpu().numpy() + 1)
        log_p = right[:, 0] - logits.logsumexp(1)
        probabilities.append(log_p.double().exp().cpu().numpy())
    return np.concatenate(ranks), np.concatenate(probabilities)


def _tellable(model: LanguageModel, pairs: bool, reader: reach.Reader | None) -> list[str]:
    """Return the causes that can be told at all."""
    left_out = set()
    if not pairs:
        left_out |= {DECOY, OTHER_PAIR}
    if not pairs or not reach.masks(model):
        left_out.add(MASKED)
    if reader is None:
        left_out.add(DECAYED)
    return [name for name in CAUSES if name not in left_out]


def _cause(name: str, cause: Int[np.ndarray, "n w"], wrong: Asked) -> Cause:
    index = CAUSES.index(name)
    mine = cause[0] == index
    distance = (wrong.positions - wrong.values)[mine & (wrong.values >= 0)]
    return Cause(
        name=name,
        count=int(mine.sum()),
        share=float(mine.mean()),
        interval=wilson(float(mine.mean()), mine.size),
        chance=math.nan if name in (OUTRANKED, UNKNOWN) else float((cause[1:] == index).mean()),
        distance=float(np.median(distance)) if len(distance) else math.nan,
    )


def _examples(
    cause: Int[np.ndarray, " w"],
    wrong: Asked,
    inputs: Int[np.ndarray, "b t"],
    given: Int[np.ndarray, " w"],
    rank: Int[np.ndarray, " w"],
    probability: Float[np.ndarray, " w"],
) -> tuple[Example, ...]:
    """Return the first errors of each cause in turn."""
    of_cause = [np.flatnonzero(cause == i).tolist() for i in range(len(CAUSES))]
    in_turn = [i for i in chain(*zip_longest(*of_cause)) if i is not None]
    return tuple(
        Example(
            row=int(wrong.rows[i]),
            position=int(wrong.positions[i]),
            token=int(inputs[wrong.rows[i], wrong.positions[i]]),
            right=int(wrong.targets[i]),
            answered=int(given[i]),
            cause=CAUSES[cause[i]],
            rank=int(rank[i]),
            probability=float(probability[i]),
        )
        for i in in_turn[:EXAMPLES]
    )

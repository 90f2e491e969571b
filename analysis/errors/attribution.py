"""Attribute every wrong answer to one cause, and random answers beside them by the same rules."""

import math
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
    Questions,
)
from analysis.errors.examples import Example, Examples
from analysis.errors.ledger import TOP, Cause, Ledger
from analysis.links import has_pairs
from analysis.scoring import PART_ENTRIES, Scored, scored
from analysis.statistics.intervals import bound_share
from lab.models import LanguageModel

REDRAWN = 8
"""Random answers drawn for each wrong one, to see what chance attributes to a cause."""
EXAMPLES = 12


@torch.no_grad()
def attribute_errors(subject: Subject) -> tuple[Ledger, Examples]:
    """Attribute a subject's errors: the counts by cause, and up to `EXAMPLES` of them.

    Raises:
        NotApplicableError: when no position is scored.
    """
    batch, model = subject.batch, subject.model
    rng = np.random.default_rng(subject.seed)
    found = scored(model, batch)
    everyone = why.find_questions(batch)
    if not len(everyone):
        raise NotApplicableError("no position is scored")
    wrong_at = np.flatnonzero(~found.right.cpu().numpy())
    wrong = everyone[wrong_at]
    inputs = batch.inputs.cpu().numpy()
    given = found.answers.cpu().numpy()[wrong_at]
    # Set 0 is what the model answered; the others are random.
    random = why.draw_wrong_answers(wrong, everyone.targets, REDRAWN, rng)
    answers = np.concatenate([given[None], random])
    pairs = np.stack([why.match_other_pairs(batch, wrong, row) for row in answers])
    seen = np.stack([why.find_last_occurrences(inputs, wrong, row) for row in answers])
    hidden = reach.detect_masked(model, batch, wrong)
    relieved = np.zeros(answers.shape, bool)
    if hidden.any():
        without = reach.answer_unmasked(model, batch).cpu().numpy()[wrong_at]
        others = [why.draw_other_values(batch, wrong, rng) for _ in range(REDRAWN)]
        tokens = [np.where(at >= 0, inputs[wrong.rows, at], -1) for at in others]
        relieved = hidden & (without == np.stack([wrong.targets, *tokens]))
    reader, faded = None, np.zeros(answers.shape, bool)
    if has_pairs(batch) and len(wrong):
        stored = why.find_values(batch)[wrong.rows, np.maximum(pairs, 0)]
        rivals = np.where(pairs >= 0, stored, seen)
        placebo = why.draw_other_values(batch, everyone, rng)
        reader, faded = reach.detect_decayed(model, batch, everyone, placebo, wrong, rivals)
    rank, probability = _rank_right_answers(found, wrong_at)
    cause = why.choose_causes(
        {
            DECOY: np.stack([why.detect_decoys(inputs, wrong, row) for row in answers]),
            MASKED: relieved,
            DECAYED: faded,
            OTHER_PAIR: pairs >= 0,
            IN_ROW: seen >= 0,
            OUTRANKED: np.broadcast_to(rank <= TOP, answers.shape),
            UNKNOWN: np.ones(answers.shape, bool),
        }
    )
    beside, by_chance = why.find_neighbours(batch, wrong, pairs[0])
    detectable = _list_detectable(model, has_pairs(batch), reader) if len(wrong) else []
    ledger = Ledger(
        rows=len(inputs),
        scored=len(everyone),
        wrong=len(wrong),
        interval=bound_share(~found.right.cpu().numpy(), everyone.rows, rng),
        causes=tuple(_count_cause(name, cause, wrong, rng) for name in detectable),
        pairs=has_pairs(batch),
        neighbours=float(beside.mean()) if len(beside) else math.nan,
        neighbours_interval=bound_share(beside, wrong.rows[pairs[0] >= 0], rng)
        if len(beside)
        else (math.nan, math.nan),
        by_chance=by_chance,
        masked=int(hidden.sum()),
        reader=reader,
        rank=float(np.median(rank)) if len(rank) else math.nan,
    )
    examples = _choose_examples(cause[0], wrong, inputs, given, rank, probability)
    return ledger, Examples(examples)


def _rank_right_answers(
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


def _list_detectable(model: LanguageModel, pairs: bool, reader: reach.Reader | None) -> list[str]:
    """Return the causes that can be detected on this task and model."""
    left_out = set()
    if not pairs:
        left_out |= {DECOY, OTHER_PAIR}
    if not pairs or not reach.list_mask_hooks(model):
        left_out.add(MASKED)
    if reader is None:
        left_out.add(DECAYED)
    return [name for name in CAUSES if name not in left_out]


def _count_cause(
    name: str, cause: Int[np.ndarray, "n w"], wrong: Questions, rng: np.random.Generator
) -> Cause:
    index = CAUSES.index(name)
    mine = cause[0] == index
    distance = (wrong.positions - wrong.values)[mine & (wrong.values >= 0)]
    return Cause(
        name=name,
        count=int(mine.sum()),
        share=float(mine.mean()),
        interval=bound_share(mine, wrong.rows, rng),
        chance=math.nan if name in (OUTRANKED, UNKNOWN) else float((cause[1:] == index).mean()),
        distance=float(np.median(distance)) if len(distance) else math.nan,
    )


def _choose_examples(
    cause: Int[np.ndarray, " w"],
    wrong: Questions,
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

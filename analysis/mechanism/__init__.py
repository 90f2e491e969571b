"""How does it recall? By which route the answer comes, and which edges carry it."""

import numpy as np

from analysis.base import NotApplicableError, Subject, describe, draw
from analysis.links import has_pairs
from analysis.mechanism.components import Components, measure_components
from analysis.mechanism.cues import cues
from analysis.mechanism.edits import Edited
from analysis.mechanism.effects import baseline, edit, restore
from analysis.mechanism.label import Mechanism, classify
from analysis.mechanism.swapped_keys import couples
from analysis.statistics.intervals import bootstrap

__all__ = ["TITLE", "describe", "draw", "measure"]

TITLE = "How does it recall?"
ROW_TOKENS = 16_384
"""Tokens of the rows that are looked at, in blocks: deeper models are shown fewer."""
MOST_ROWS = 64
FEWEST_ROWS = 8


def measure(subject: Subject) -> list[Mechanism | Edited | Components]:
    """Return the mechanism, what editing mixers leaves of recall, and what components carry.

    Raises:
        NotApplicableError: for a task whose rows store no pairs, or a single one, or whose
            answers do not change places with the keys.
    """
    if not has_pairs(subject.batch):
        raise NotApplicableError("the task's rows store no pairs")
    seq_len, n_layers = subject.batch.inputs.shape[1], len(subject.model.blocks)
    wanted = ROW_TOKENS * 2 // (seq_len * max(2, n_layers))
    batch = subject.batch[slice(0, min(MOST_ROWS, max(FEWEST_ROWS, wanted)))]
    rng = np.random.default_rng(subject.seed)
    pairs = couples(subject.task, batch, rng)
    if pairs is None:
        raise NotApplicableError("no row stores two pairs, whose keys could be exchanged")
    if not pairs.valid.any():
        raise NotApplicableError("the answers do not change places when keys do")
    found = cues(subject, pairs.clean, rng)
    known = baseline(subject.model, pairs)
    # As sums over rows; where keys do not move the margin, shares of that move mean nothing.
    moved = known.sums(known.clean)[:, 1:]
    answers_move = bootstrap(moved, rng)[0] > 0
    restored = restore(subject.model, pairs, known, rng) if answers_move else None
    edited = edit(subject.model, pairs, known, rng) if answers_move else None
    label, reason, evidence = classify(found, restored, edited)
    mechanism = Mechanism(
        label, reason, evidence, found.key, found.position, restored, len(pairs.query)
    )
    results: list[Mechanism | Edited | Components] = [mechanism]
    if edited is not None:
        results.append(edited)
    if answers_move:
        results.append(measure_components(subject.model, pairs, known, rng))
    return results

"""How does the model recall: by which route the answer arrives, and which edges carry it."""

import numpy as np

from analysis.base import NotApplicableError, Subject, describe, draw
from analysis.links import find_offsets, has_pairs
from analysis.mechanism.couples import draw_couples, measure_baseline, measure_followed
from analysis.mechanism.effects import (
    Components,
    Edited,
    edit,
    measure_components,
    restore,
)
from analysis.mechanism.label import Mechanism, classify
from analysis.statistics.intervals import bootstrap

__all__ = ["TITLE", "describe", "draw", "measure"]

TITLE = "How does it recall?"
ROW_TOKENS = 16_384
"""Maximum number of tokens to analyze, for a model of two blocks; deeper models get fewer rows."""
MOST_ROWS = 64
FEWEST_ROWS = 8


def measure(subject: Subject) -> list[Mechanism | Edited | Components]:
    """Return the mechanism, what edits of a mixer leave of recall, and which components carry it.

    Raises:
        NotApplicableError: when the task asks for no value that is stored beside its key, when
            rows store only one pair, or when exchanging keys does not exchange the answers.
    """
    if not has_pairs(subject.batch):
        raise NotApplicableError("the task asks for no value that is stored beside its key")
    seq_len, n_layers = subject.batch.inputs.shape[1], len(subject.model.blocks)
    wanted = ROW_TOKENS * 2 // (seq_len * max(2, n_layers))
    batch = subject.batch[slice(0, min(MOST_ROWS, max(FEWEST_ROWS, wanted)))]
    rng = np.random.default_rng(subject.seed)
    pairs = draw_couples(subject.task, batch, rng)
    if pairs is None:
        raise NotApplicableError("no row stores two pairs whose keys could be exchanged")
    if not pairs.valid.any():
        raise NotApplicableError("the answers do not change places when the keys do")
    found = measure_followed(subject, pairs.clean, rng)
    known = measure_baseline(subject.model, pairs)
    # Shares of the change are meaningless unless exchanging keys surely changes the margin.
    answers_move = bootstrap(known.sum_changes(known.clean)[:, 1:], rng)[0] > 0
    if not answers_move:
        label, reason, evidence = classify(found, None, None)
        return [
            Mechanism(label, reason, evidence, found.key, found.position, None, len(pairs.query))
        ]
    offsets = find_offsets(subject)
    carried = known.shift_values(offsets.gathered)
    restored = restore(subject.model, carried, rng)
    edited = edit(subject.model, known, rng, offsets)
    label, reason, evidence = classify(found, restored, edited)
    mechanism = Mechanism(
        label, reason, evidence, found.key, found.position, restored, len(pairs.query), offsets
    )
    components = measure_components(subject.model, carried, rng, offsets)
    return [mechanism, components] if edited is None else [mechanism, edited, components]

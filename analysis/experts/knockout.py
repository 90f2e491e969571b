"""Which experts matter? Answers without the most loaded ones, their twins, and all of them."""

from typing import NamedTuple

import numpy as np

from analysis.base import Subject, describe, draw
from analysis.experts.held_answers import HeldAnswers, measure_held_answers
from analysis.experts.holders import SHORTLIST
from analysis.experts.layer_knockout import LayerKnockout, knock_out_layer
from analysis.experts.role_effects import RoleEffects
from analysis.experts.sites import build_sites, find_retrieval_layers
from analysis.statistics.estimates import thin
from tasks.base import count_rows

__all__ = ["TITLE", "describe", "draw", "measure"]

TITLE = "Experts knocked out"
TOKENS = 4096
"""Maximum number of tokens to run again for each deletion, unless below `FEWEST_ROWS` rows."""
FEWEST_ROWS = 4
PLANS = ((6, 8, 1.0), (6, 4, 1.0), (6, 3, 0.5), (4, 3, 0.25), (2, 3, 0.25), (2, 2, 0.25))
"""Layers, experts of each kind and share of the rows to measure; the first plan that is cheap
enough is chosen."""
WORK = 4e8
"""The most that is cheap enough: tokens × (`seq_len` + 1024) × blocks that run again, over all
deletions."""
MOST_ANSWERS, FEWEST_ANSWERS = 256, 16
"""Answers whose holders are searched."""


class KnockoutPlan(NamedTuple):
    """What is measured: which blocks, how many experts of each kind, and how many rows."""

    layers: tuple[int, ...]
    n_experts: int
    rows: int


def measure(subject: Subject) -> list[LayerKnockout | RoleEffects | HeldAnswers]:
    """Knock out experts of each layer, at the tokens of each role, and find who holds answers.

    Answers are those of the layer whose experts matter most. Roles are left out where all tokens
    have the same.

    Raises:
        NotApplicableError: for a model without product-key experts.
    """
    plan = plan_knockout(subject)
    rows = subject.batch[: plan.rows]
    found = build_sites(subject.model, rows, plan.layers)
    rng = np.random.default_rng(subject.seed)
    names = subject.task.role_names
    layers = tuple(knock_out_layer(site, names, rng, plan.n_experts) for site in found)
    most = max(layers, key=lambda found: found.everything.loss)
    count = count_affordable(subject, most.layer)
    held = measure_held_answers(subject.model, rows, most.layer, rng, count)
    by_role = [RoleEffects(layers)] if (rows.roles != rows.roles[0, 0]).any() else []
    return [*layers, *by_role, held]


def count_affordable(subject: Subject, layer: int) -> int:
    """Count the answers of a layer whose holders can be searched: each takes several reruns."""
    seq_len, again = subject.task.seq_len, len(subject.model.blocks) - 1 - layer
    each = SHORTLIST * seq_len * (seq_len + 1024) * max(again, 1)
    return int(min(MOST_ANSWERS, max(FEWEST_ANSWERS, WORK // each)))


def plan_knockout(subject: Subject) -> KnockoutPlan:
    """Return the first of `PLANS` that is cheap enough for this model and rows, or the last.

    Raises:
        NotApplicableError: for a model without product-key experts.
    """
    blocks, seq_len = len(subject.model.blocks), subject.task.seq_len
    layers = list(find_retrieval_layers(subject.model))
    full = count_rows(TOKENS, seq_len, fewest=FEWEST_ROWS, most=len(subject.batch.inputs))
    plans = []
    for most_layers, n_experts, share in PLANS:
        tried = tuple(thin(layers, most_layers))
        rows = min(full, max(FEWEST_ROWS, round(share * full)))
        runs = 2 * n_experts + 1 + 2 * len(subject.task.role_names)
        again = sum(blocks - 1 - layer for layer in tried)
        plan = KnockoutPlan(tried, n_experts, rows)
        if rows * seq_len * (seq_len + 1024) * again * runs <= WORK:
            return plan
        plans.append(plan)
    return plans[-1]

"""Clauses of words and readings: each with a finding that has it, and one that lacks it."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from analysis.dynamic_mask.beyond import Beyond
from analysis.errors.ledger import Cause, Ledger
from analysis.experts.co_activation import CoActivation
from analysis.experts.layer_pairs import LayerPairs
from analysis.experts.load_by_rank import LoadByRank
from analysis.experts.spread import Spread
from analysis.frequencies.uses import FrequencyUses
from analysis.matrices.head_reach import HeadReach
from analysis.matrices.head_scores import HeadScores

from analysis.base import Finding
from analysis.dynamic_mask.effect import MaskEffect
from analysis.errors.causes import MASKED
from analysis.experts.load import Load
from analysis.matrices.layer_matrix import LayerMatrix
from tests.unit.analysis.sentences import of_models, of_runs
from tests.unit.analysis.sentences.of_models import estimate, masked, uses


class Clause(NamedTuple):
    """Two findings, and what the words of the first alone have."""

    holds: Finding
    lacks: Finding
    words: str


def mask_effect(beyond: Beyond, hidden: float = 0.0, lost: float = 0.0) -> MaskEffect:
    """Return the effect of a head that moves attention to answers and masks this much of it."""
    head = masked((0.2, 0.4), estimate(0.5))
    assert head.pairs is not None
    gains = estimate(0.3, 0.0, 0.1)
    pairs = replace(head.pairs, gained=gains, hidden=estimate(hidden, 0.3, 0.0))
    head = replace(head, moved=0.3, pairs=pairs, lost=estimate(lost, 0.3, 0.0))
    return MaskEffect(estimate(0.5), (0,), (estimate(0.0),), (1.0,), beyond, (head,))


def pairs(coalition: int = 0) -> LayerPairs:
    bars = np.zeros(140)
    found: Any = (None, np.zeros(19), 0.2, 0.2, np.zeros(coalition, int), (), bars, bars)
    return LayerPairs(0, 99, 9, 9, 0.5, *found)


def load(layer: int, effective: float) -> Load:
    spread = Spread(0.5, effective, 0.5, 0.5, (1.0, 3.0, 5.0), 0.5)
    used = (spread, spread, replace(spread, effective=9))
    rest: Any = (16, 1, 2, 99, *used, *[0] * 10, None)
    return Load(layer, "CDMoE", *rest)


def used(long: float) -> FrequencyUses:
    """Return a use whose long wavelengths carry this share of the advantage."""
    [use] = uses(np.array([[0.5, 9.0]])).layers
    return FrequencyUses((replace(use, long=np.full(2, long)),), 16)


def against(low: float, high: float) -> FrequencyUses:
    """Return a use by negative scores, −9, with this interval."""
    [use] = uses(np.array([[0.5, -9.0]])).layers
    return FrequencyUses((replace(use, interval=(low, high)),), 16)


def beside(*keys: float) -> HeadReach:
    """Return heads by how many keys they spread over."""
    given, places = np.array(keys), np.arange(len(keys))
    return replace(ALL, layers=0 * places, heads=places, effective_keys=given, distance=given)


def heads(*shares: float) -> HeadScores:
    """Return heads by their mass on the token before, of which a uniform row has a tenth."""
    one = np.array(shares)[:, None]
    places, chance = np.arange(len(one)), np.array([0.1])
    ends: Any = (one, chance, one, chance, 0 * one + 0.05, 0 * one + 0.2, False, 4)
    return HeadScores(0 * places, places, ("A",) * len(one), ("previous token",), *ends)


def signed(pool: int = 1) -> LayerMatrix:
    """Return a layer whose matrix has both signs."""
    assert MATRIX.picture is not None
    return replace(MATRIX, picture=replace(MATRIX.picture, signed=True, pool=pool))


def ledger(wrong: int, cause: str = "outranked") -> Ledger:
    causes = (Cause(cause, wrong, 1.0, (0.9, 1.0), 0.1, 5.0),)
    return Ledger(8, 90, wrong, (0.0, 0.3), causes, False, 0.5, (0, 1), 0.5, 2, None, 1)


FAR = Beyond(8, 0.5, 0.2, 32, estimate(0.9), (0.75,), "")
UNSEEN = Beyond(0, 0.5, 0.2, 32, None, (), "no rows")
MATRIX = of_models.pairless(0.9)
ALL = of_models.reach((2, 8), (1, 3))
NONE = np.full((1, 1), np.nan)
DELETED = of_runs.knockout(0.5, 0.1)
CLAUSES = [
    Clause(mask_effect(FAR), mask_effect(UNSEEN), "Of the 8 table entries past these rows 50.0 %"),
    Clause(mask_effect(FAR), mask_effect(UNSEEN), "On rows of 32 tokens 90.0 %"),
    Clause(mask_effect(FAR), mask_effect(replace(FAR, auroc=())), "AUROC there: 0.75"),
    Clause(mask_effect(UNSEEN), mask_effect(FAR), "Rows twice as long were not measured: no rows."),
    Clause(mask_effect(FAR, hidden=0.2), mask_effect(FAR), "20.0 % of the answers are masked"),
    Clause(mask_effect(FAR, lost=0.2), mask_effect(FAR), "(mass lost: 20.0 %"),
    Clause(replace(DELETED, unused=3), DELETED, "No token uses 3 of the experts"),
    Clause(DELETED, replace(DELETED, unused=3), "Every expert is used"),
    Clause(replace(DELETED, rows=9), replace(DELETED, rows=10), "narrower than they should be"),
    Clause(
        replace(DELETED, by_answer={"a": of_runs.change(0.2), "b": of_runs.change(0.1)}),
        replace(DELETED, by_answer={"a": of_runs.change(0.2)}),
        "over answers at b tokens it changes the loss by +0.10",
    ),
    Clause(
        CoActivation((pairs(coalition=3),)),
        CoActivation((pairs(),)),
        "mostly chosen together has 3 experts",
    ),
    Clause(
        CoActivation((pairs(), replace(pairs(), layer=1), replace(pairs(), layer=2))),
        CoActivation((pairs(), replace(pairs(), layer=1))),
        "beyond the shuffles of all layers also in 2 of 2 other layers",
    ),
    Clause(
        LoadByRank((load(0, 2), load(1, 4))), LoadByRank((load(0, 2),)), "the most even of 2 layers"
    ),
    Clause(ledger(1), ledger(2), "1 of 90 answers (1.1 %) is wrong"),
    Clause(ledger(9, MASKED), ledger(9), "hides the key or value of 2 errors"),
    Clause(used(-0.2), used(0.5), "longer than the row count against it (-20.0 %)"),
    Clause(used(1.2), used(0.5), "carry 120.0 % of it, more than all since shorter ones lower it"),
    Clause(used(0.5), used(1.2), "longer than the row carry 50.0 % of it (they are"),
    Clause(of_models.reach((2, np.nan), (3, np.nan)), ALL, "; 1 head has no mass."),
    Clause(beside(2, np.nan, np.nan), ALL, "; 2 heads have no mass."),
    Clause(replace(ALL, mixers=("Attention", "SSD")), ALL, "An SSD matrix has D, the skip"),
    Clause(heads(0.9, 0.9, 0.9, 0.9), heads(0.9, 0.9, 0.9), "; 1 further head shows a pattern."),
    Clause(heads(*[0.9] * 5), heads(*[0.9] * 4), "; 2 further heads show a pattern."),
    Clause(heads(0.9), replace(heads(0.9), moved_shares=NONE), "(20.0 % by what it moves, uniform"),
    Clause(replace(heads(0.9), moved_shares=NONE), heads(0.9), "is not linear in what it mixes"),
    Clause(replace(heads(0.9), sampled=True), heads(0.9), "random rows of the matrix"),
    Clause(of_models.layer(1, 0.2, 0.2), of_models.pairless(0.9), "Rings mark where a query"),
    Clause(signed(pool=2), MATRIX, "signed max over 2 × 2"),
    Clause(signed(), MATRIX, "Colours end at ±1"),
    Clause(MATRIX, signed(), "Colours end at 0 and 1"),
    Clause(against(-99, -8), against(-10, 1), "most in layer 0 (Q/K, head 0.1), -9.00 standard"),
]

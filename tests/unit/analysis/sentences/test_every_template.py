"""Each finding's words are put to three cases: a planted truth, a null and a boundary.

The cases stand in `of_models` and `of_runs`; those that older tests hold are named in `ELSEWHERE`.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from analysis.statistics.binned import describe_extremes

import analysis
from analysis.base import Finding
from tests.unit.analysis.sentences import (
    clauses,
    clauses_of_models,
    clauses_of_runs,
    of_models,
    of_runs,
)
from tests.unit.analysis.sentences.clauses import Clause
from tests.unit.analysis.sentences.of_models import Case, edited, uses
from tests.unit.analysis.sentences.of_runs import bins, change, knockout, roles

KINDS = ("planted", "null", "boundary")
CASES = of_models.CASES + of_runs.CASES
CLAUSES = clauses.CLAUSES + clauses_of_models.CLAUSES + clauses_of_runs.CLAUSES
UNIT = Path(__file__).parents[2]
ELSEWHERE = {
    "AccuracyByPlace": "rows/test_positions: named_only_where_their_intervals_part, "
    "seldom_due_to_chance, go_wrong_together_widen_the_interval",
    "Components": "mechanism/test_components: planted_components_are_named, "
    "named_by_chance_in_few, planted_components_are_named",
    "Continuations": "rows/test_samples: bits_are_the_loss, legal_answers, numbers_are_readable",
    "Course": "experts/test_training: comes_and_goes_is_named, random_weights_are_as_alike, "
    "few_or_by_chance_are_no_coalition",
    "Curve": "run/test_curves: most_of_the_change_is_where, noise_has_no_jump, one_evaluation_is",
    "FrequenciesByLag": "frequencies/test_lags: a_peak_names_the_fewest, a_peak_names_the_fewest, "
    "a_peak_names_the_fewest",
    "HeadScores": "matrices/test_heads: planted_heads_are_named, a_random_model_shows_no_pattern, "
    "a_single_row_is_sure_of_no_head",
    "Ledger": "errors/test_errors: who_answers_with_the_next_pair, no_error_is_bounded, "
    "few_errors_are_counted",
    "LoadByRank": "experts/test_load: zero_keys_are_a_tie, an_untrained_layer_is_not, "
    "a_planted_coalition_is_found",
    "LoadComparison": "experts/test_load: zero_keys_are_a_tie, an_untrained_layer_is_not, "
    "standing_experts_of_random_choice",
    "LoadMap": "experts/test_load_map: a_row_that_decides_the_column, drawn_apart_share_nothing, "
    "few_token_ids_are_not_said_to_tie",
    "Mechanism": "mechanism/test_label: a_planted_mechanism_gets_its, one_row_has_no_interval, "
    "the_label_abstains_where",
    "PairMass": "recall/test_recall: a_planted_head_has_its_mass, uniform_rows_have_chance, "
    "a_mixer_without_matrix_is_named",
    "Paths": "run/test_dynamics: a_planted_run_is_told, in_which_nothing_moves_says_so, "
    "moves_at_no_one_time",
    "Ranking": "pages/test_ranking: a_planted_difference_in_steps, a_null_is_silent, "
    "one_seed_is_no_ranking",
    "RecallByPlace": "recall/test_recall: contrast_is_stated_only, contrast_is_stated_only, "
    "an_interval_knows_how_few",
    "RolePreferences": "experts/test_roles: a_planted_expert_of_each_role, choices_without_a_role, "
    "the_best_is_held_to_the_best_by_chance",
    "Rollout": "matrices/test_rollout: finds_a_planted_induction, recall_shows_in_a_rollout_by, "
    "recall_shows_in_a_rollout_by",
    "RowLayout": "rows/test_rows: roles_and_scored_positions, one_role_and_one_answer, "
    "one_role_and_one_answer",
    "ScoresByLag": "frequencies/test_lags: a_planted_lag_is_where, a_planted_lag_is_where, "
    "a_planted_lag_is_where",
    "SeedOrder": "pages/test_comparison: over_seeds_the_page_says, seeds_without_kept_weights, "
    "without_seeds_to_compare",
    "Standing": "run/test_baselines: every_ending_has_a_sentence, rules_are_placed_by, "
    "a_solved_run_is_not_said_to_be_open",
    "Swaps": "value_usage/test_swaps: a_swap_that_costs_is_said, null_swaps_are_said_to_cost_at, "
    "at_chance_swaps_tell_nothing",
}
"""By finding: a file of tests, and parts of the names of those that hold the three kinds."""
FACTS = {"Examples", "StackAnatomy"}
"""Findings whose words list what is there and compare nothing, so that there is no null."""


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{type(case.finding).__name__}-{case.kind}" for case in CASES]
)
def test_words_have_what_holds_and_lack_what_does_not(case: Case):
    words = case.finding.describe()
    said = f"{words.says} {words.gist}"
    assert case.has in said
    assert case.lacks not in said
    assert words.says.endswith(".")


@pytest.mark.parametrize("clause", CLAUSES, ids=[clause.words for clause in CLAUSES])
def test_a_clause_stands_only_where_it_holds(clause: Clause):
    holds, lacks = (
        f"{words.title} {words.gist} {words.says} {words.reading} {words.alt}"
        for words in (clause.holds.describe(), clause.lacks.describe())
    )
    assert clause.words in holds
    assert clause.words not in lacks


def list_findings(base: type = Finding) -> Iterator[str]:
    for found in base.__subclasses__():
        if found.__module__.startswith("analysis."):
            yield found.__name__
        yield from list_findings(found)


def test_every_template_is_put_to_the_three():
    for module in pkgutil.walk_packages(analysis.__path__, "analysis."):
        importlib.import_module(module.name)
    here = {(type(case.finding).__name__, case.kind) for case in CASES}
    there = {(name, kind) for name in ELSEWHERE for kind in KINDS}
    every = {(name, kind) for name in set(list_findings()) - FACTS for kind in KINDS}
    assert every - here - there == set()
    assert set(ELSEWHERE) <= {name for name, _ in every}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_older_tests_hold_is_there(name: str):
    file, tests = ELSEWHERE[name].split(": ")
    defined = [
        line
        for line in (UNIT / "analysis" / f"{file}.py").read_text().splitlines()
        if "def" in line
    ]
    for part in tests.split(", "):
        assert any(part in line for line in defined), part


def test_best_and_worst_differ_as_they_are_written():
    said = describe_extremes(bins(0.5004, 0.5001, half=1e-5), ["a", "b"])
    assert said == "50.04 % at a against 50.01 % at b"
    assert describe_extremes(bins(0.5, 0.5, half=0.1), ["a", "b"]) == ""
    assert describe_extremes(bins(0.5, 0.9, half=0.3), ["a", "b"]) == ""


def test_a_frequency_is_seldom_named_by_chance():
    """Of 16 heads without an effect, one is beyond its own interval in 56 % of cases."""
    rng = np.random.default_rng(0)
    named = sum("most in" in uses(rng.standard_normal((4, 4))).describe().says for _ in range(400))
    # 5 % of 400 is 20 ± 4.4.
    assert named <= 33


def test_an_expert_like_its_twins_seldom_stands_out():
    """Of an expert and a twin that harm alike, the expert harms more in half of all cases."""
    rng = np.random.default_rng(0)
    named = sum(
        "One expert" in knockout(*rng.normal(0.5, 0.025, 2), twins=1).describe().says
        for _ in range(400)
    )
    # The interval of one is below the other's effect in 8 % of cases, half of a two-sided 16 %.
    assert named <= 48


def test_roles_that_need_experts_alike_are_not_ranked():
    rng = np.random.default_rng(0)
    ranked = sum(
        "needed most" in roles(key=change(key), value=change(value)).describe().says
        for key, value in rng.normal(0.5, 0.025, (400, 2))
    )
    assert ranked <= 8


def test_an_edit_without_effect_is_seldom_said_to_leave_least():
    rng = np.random.default_rng(0)
    named = sum(
        "surely leaves less" in edited(tuple(rng.normal(1, 0.07, 2))).describe().says
        for _ in range(400)
    )
    assert named <= 20

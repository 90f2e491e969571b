"""Every analysis on every task: it measures, says and draws something, or says why not."""

import json

import plotly.graph_objects as go
import pytest

from analysis import ANALYSES, READ_VECTORS
from analysis.base import Subject
from analysis.examination import examine
from analysis.plain import to_plain
from lab.models import build
from tasks import TASKS
from tests.task_cases import CASES

SIZES = {
    "mqar": {"seq_len": 16, "vocab_size": 32},
    "overwrite": {"seq_len": 24, "n_pairs": 2, "vocab_size": 32},
    "compositional": {"seq_len": 24, "n_pairs": 4, "vocab_size": 16},
    "hops": {"seq_len": 20, "n_pairs": 4, "vocab_size": 16},
    "fuzzy": {"seq_len": 24, "n_pairs": 2, "vocab_size": 16},
    "selective_copy": {"seq_len": 16, "n_tokens": 3},
    "copy": {"seq_len": (12, 16)},
    "flip_flop": {"seq_len": 16, "p_ignore": 0.5},
    "induction": {"seq_len": 16, "vocab_size": 8},
    "word_problem": {"seq_len": 8, "group": "Z2"},
    "memorize": {"seq_len": 24, "n_facts": 32, "vocab_size": 32},
    "regression": {"seq_len": 16, "n_dims": 3},
    "language": {"seq_len": 24, "max_states": 4, "n_symbols": 6, "max_length": 6},
    "bytes": {"seq_len": 16},
    "stack": {"seq_len": 24, "n_stacks": 2, "vocab_size": 16},
    "palindrome": {"seq_len": 12, "vocab_size": 8},
    "sort": {"seq_len": 12, "vocab_size": 8},
    "brackets": {"seq_len": 16, "n_kinds": 2, "max_depth": 3},
    "grammar": {"seq_len": 24, "depth": 2},
    "capo": {"seq_len": 24, "n_people": 32, "n_names": 4, "n_attributes": 2, "n_values": 8},
    "addition": {"seq_len": 14},
    "depo": {"seq_len": 40, "n_nodes": 5, "n_queries": 3, "hops": 2, "n_letters": 4},
    "brevo": {"seq_len": 24, "n_nodes": 5, "max_degree": 2, "vocab_size": 11},
    "mano": {"seq_len": 11, "length": 4, "modulus": 5},
}
"""Of each task whose first case in `tests.task_cases` has too little to analyse."""
STACKS = {
    "AM*2": {},
    "SM AM": {"S.position": "conv"},
    "SE IE": {"E.n_experts": 16, "E.k": 2, "I.mask": "soft", "I.n_values": 4},
}
EVERYTHING = "SE IE"
"""The stack that most analyses apply to."""
UNLIKE = ("mqar", "copy", "language", "bytes", "memorize", "regression")
"""Tasks of different roles, links and targets; a normal run has `EVERYTHING` on these alone."""
LINKED = ("positions", "mechanism", "recall", "errors", "matrices", "rollout")
"""Analyses that depend on the task's roles and links; they are tried on the other stacks too."""
FEWER = {
    "experts.knockout.PLANS": ((1, 2, 1.0),),
    "experts.knockout.MOST_ANSWERS": 4,
    "frequencies.PLACEBOS": 2,
    "value_usage.PASSES": 16,
}
"""Interventions, each of which runs the model again."""
ROWS = 3


PLACES = [
    pytest.param(
        name,
        stack,
        marks=[pytest.mark.thorough] if stack == EVERYTHING and name not in UNLIKE else [],
    )
    for stack in STACKS
    for name in TASKS
]


@pytest.mark.parametrize(("name", "stack"), PLACES)
def test_every_analysis_applies_or_says_why_not(name, stack, monkeypatch):
    for name_of, value in FEWER.items():
        monkeypatch.setattr(f"analysis.{name_of}", value)
    task = TASKS[name](**SIZES.get(name, CASES[name][0]))
    model = build(stack, **task.sizes, d_model=16, options=STACKS[stack]).eval()
    subject = Subject(task, model, task.batch(split="test", size=ROWS))
    applied = set()
    found = examine(subject, [*ANALYSES] if stack == EVERYTHING else LINKED, lenient=True)
    for key, results in found.results.items():
        applied.add(key)
        for result in results:
            assert result.says.endswith("."), result.says
            assert "nan" not in result.says.lower().split(), result.says
            json.dumps(to_plain(result), allow_nan=False)
            if stack == EVERYTHING:
                drawn = result.figure()
                assert not isinstance(drawn, go.Figure) or len(drawn.to_json() or "") < 3 * 2**20
    if task.vectors:
        assert {"positions", "matrices", "rollout"} <= applied <= {*READ_VECTORS}
        assert found.not_applicable["errors"] == "rows of regression are vectors, not tokens"
        return
    assert {"errors", "matrices", "rollout"} <= applied
    assert ("recall" in applied) == ({"key_pos", "value_pos"} <= subject.batch.links.keys())
    if stack == EVERYTHING:
        assert {"rows", "heads", "dynamic_mask", "expert_knockout", "state_space"} <= applied
        assert ("samples" in applied) == task.stochastic

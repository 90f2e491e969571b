"""What a trained model learned.

An analysis is a module whose `measure(subject)` returns findings. A finding has a sentence, `says`,
numbers and a figure. The report shows the analyses that apply, in the order of `ANALYSES`.
"""

from collections import UserDict
from importlib import import_module
from typing import Any


class _Analyses(UserDict[str, Any]):
    """The module of each analysis (`analysis.base.Analysis`), imported when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        return import_module(found) if isinstance(found, str) else found


ANALYSES = _Analyses(
    baselines="analysis.run.baselines",
    leaks="analysis.run.leaks",
    rows="analysis.rows",
    tokens="analysis.rows.tokens",
    curves="analysis.run.curves",
    generalisation="analysis.run.generalisation",
    positions="analysis.rows.positions",
    samples="analysis.rows.samples",
    mechanism="analysis.mechanism",
    recall="analysis.recall",
    errors="analysis.errors",
    matrices="analysis.matrices",
    heads="analysis.matrices.heads",
    rollout="analysis.matrices.rollout",
    frequencies="analysis.frequencies",
    state_space="analysis.state_space",
    state_rank="analysis.state_space.rank",
    state_erasure="analysis.state_space.erasure",
    dynamic_mask="analysis.dynamic_mask",
    value_usage="analysis.value_usage",
    experts="analysis.experts.load",
    expert_roles="analysis.experts.roles",
    expert_map="analysis.experts.key_map",
    expert_knockout="analysis.experts.knockout",
    expert_training="analysis.experts.training",
    dynamics="analysis.run.dynamics",
    anatomy="analysis.run.anatomy",
)
"""Every analysis by name, in the order of the report."""

READ_VECTORS = (
    "baselines",
    "rows",
    "curves",
    "generalisation",
    "positions",
    "matrices",
    "rollout",
    "state_space",
    "state_rank",
    "anatomy",
)
"""The analyses that also apply where rows are vectors; the others look at tokens."""

QUICK = (
    "baselines",
    "leaks",
    "rows",
    "tokens",
    "curves",
    "generalisation",
    "positions",
    "samples",
    "mechanism",
    "recall",
    "matrices",
    "anatomy",
)
"""The quick analyses, which run at the end of a training."""

"""What a trained model learned.

One concept a file: `measure(subject) → results`, `describe(result) → Words`, `draw(result) →
Figure`. The report shows every entry of `ANALYSES`, in this order, where it applies.
"""

from analysis import (
    anatomy,
    baselines,
    curves,
    dynamic_mask,
    dynamics,
    errors,
    expert_knockout,
    expert_map,
    expert_roles,
    expert_training,
    experts,
    frequencies,
    generalisation,
    heads,
    matrices,
    mechanism,
    positions,
    recall,
    rollout,
    rows,
    samples,
    state_rank,
    state_space,
    value_usage,
)
from analysis.base import Analysis

ANALYSES: dict[str, Analysis] = {
    "baselines": baselines,
    "rows": rows,
    "curves": curves,
    "generalisation": generalisation,
    "positions": positions,
    "samples": samples,
    "mechanism": mechanism,
    "recall": recall,
    "errors": errors,
    "matrices": matrices,
    "heads": heads,
    "rollout": rollout,
    "frequencies": frequencies,
    "state_space": state_space,
    "state_rank": state_rank,
    "dynamic_mask": dynamic_mask,
    "value_usage": value_usage,
    "experts": experts,
    "expert_roles": expert_roles,
    "expert_map": expert_map,
    "expert_knockout": expert_knockout,
    "expert_training": expert_training,
    "dynamics": dynamics,
    "anatomy": anatomy,
}
"""Every analysis by name, in the order of the report."""

QUICK = (
    "baselines",
    "rows",
    "curves",
    "generalisation",
    "positions",
    "samples",
    "mechanism",
    "recall",
    "matrices",
    "anatomy",
)
"""Those that end a training: they take a moment."""

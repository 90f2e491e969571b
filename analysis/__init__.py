"""What a trained model learned.

An analysis is a module whose `measure(subject)` returns findings. A finding has a sentence, `says`,
numbers and a figure. The report shows the analyses that apply, in the order of `ANALYSES`.
"""

from analysis import (
    dynamic_mask,
    errors,
    frequencies,
    matrices,
    mechanism,
    recall,
    rows,
    state_space,
    value_usage,
)
from analysis.base import Analysis
from analysis.experts import key_map as expert_map
from analysis.experts import knockout as expert_knockout
from analysis.experts import load as expert_load
from analysis.experts import roles as expert_roles
from analysis.experts import training as expert_training
from analysis.matrices import heads, rollout
from analysis.rows import positions, samples, tokens
from analysis.run import anatomy, baselines, curves, dynamics, generalisation, leaks
from analysis.state_space import rank as state_rank

ANALYSES: dict[str, Analysis] = {
    "baselines": baselines,
    "leaks": leaks,
    "rows": rows,
    "tokens": tokens,
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
    "experts": expert_load,
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

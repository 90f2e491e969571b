"""Which experts are used? Their load by rank, and how far every layer is from random choice."""

from analysis.base import Subject, describe, draw
from analysis.experts.choices import record_choices
from analysis.experts.load import measure_load
from analysis.experts.load_by_rank import LoadByRank
from analysis.experts.load_comparison import LoadComparison, compare_loads

__all__ = ["TITLE", "describe", "draw", "measure"]

TITLE = "Which experts are used"


def measure(subject: Subject) -> list[LoadByRank | LoadComparison]:
    """Measure the load of every layer with experts, and compare it with random choice.

    Raises:
        NotApplicableError: for a model without experts.
    """
    chosen = record_choices(subject.model, subject.batch)
    loads = tuple(measure_load(layer, subject.seed) for layer in chosen)
    return [LoadByRank(loads), compare_loads(loads)]

"""Does it find what was stored? Where the mass of queries and values lies, and recall by place."""

from analysis.base import NotApplicableError, Subject, describe, draw
from analysis.links import has_pairs
from analysis.recall.by_place import RecallByPlace, measure_by_place
from analysis.recall.masses import measure_pair_mass
from analysis.recall.pair_mass import PairMass

__all__ = ["TITLE", "describe", "draw", "measure"]

TITLE = "Does it find what was stored?"


def measure(subject: Subject) -> list[PairMass | RecallByPlace]:
    """Return the mass on pairs, where a mixer offers a matrix, and the recall by place.

    Raises:
        NotApplicableError: for a task that asks for no value stored beside its key.
    """
    if not has_pairs(subject.batch):
        raise NotApplicableError("the task asks for no value that is stored beside its key")
    by_place = measure_by_place(subject)
    pair_mass = measure_pair_mass(subject)
    return [by_place] if pair_mass is None else [pair_mass, by_place]

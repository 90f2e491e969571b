"""A finding that is planted by hand, and what its sentence has and lacks."""

from typing import Literal, NamedTuple

from analysis.base import Finding


class Case(NamedTuple):
    """What a sentence says of a planted truth, of nothing at all, and of what lies between.

    Attributes:
        kind: whether there is something to say, nothing, or so little that it is not sure.
        finding: whose sentence it is.
        has: what sentence or table say.
        lacks: what neither says.
    """

    kind: Literal["planted", "null", "boundary"]
    finding: Finding
    has: str
    lacks: str = "nan"

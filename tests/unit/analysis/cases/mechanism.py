"""Labels, components and edits: planted by hand."""

import math

import numpy as np

from analysis.links import Offsets
from analysis.mechanism import Mechanism
from analysis.mechanism.couples import Measured
from analysis.mechanism.effects import Components, Edited, Restored
from tests.unit.analysis.case import Case

FOLLOW = ("follow the key", 0.7), ("follow the position", 0.2)


def mechanism(
    label: str,
    *evidence: tuple[str, float],
    depths: int = 3,
    half: float = 0.1,
    later: int = 0,
) -> Mechanism:
    """Return a label that rests on these numbers, of a model of this many depths."""
    found = tuple(
        Measured(name, value, (value - half, value + half)) for name, value in (*FOLLOW, *evidence)
    )
    share = np.zeros((5, depths))
    restored = Restored(np.arange(depths), share, np.stack([share, share], -1), 16)
    offsets = Offsets({1: later}, {0: later}) if later else Offsets()
    return Mechanism(label, "this is why", found, restored, 8, offsets)


def components(*low: float) -> Components:
    """Return mixers of layers that restore the answer at the keys, by low end of the interval."""
    n = len(low)
    share, ends = np.zeros((n, 4)), np.zeros((n, 4, 2))
    share[:, 0], ends[:, 0, 0], ends[:, 0, 1] = np.array(low) + 0.1, low, np.array(low) + 0.2
    return Components(np.arange(n), ("mixer",) * n, share, ends, 8)


def edited(left: tuple[float, float], half: tuple[float, float] = (0.1, 0.1)) -> Edited:
    """Return two layers, of whose margin every edit leaves this much."""
    blocked, placebo = np.array([left, left, left]), np.ones((3, 2))
    ends = [
        np.stack([part - to, part + to], 2)
        for part, to in ((blocked, np.array([half] * 3)), (placebo, np.full((3, 2), 0.1)))
    ]
    none = np.zeros(2)
    return Edited(np.arange(2), blocked, ends[0], placebo, ends[1], none, none, 8)


RESTORED = ("value restored after block 0", 0.9), ("placebo restored after block 0", 0.05)
LITTLE = ("value restored after block 0", 0.12), ("placebo restored after block 0", 0.05)
EXCHANGED = ("left with values exchanged", 0.04), ("left with other positions exchanged", 0.96)
CASES = [
    Case(
        "planted",
        mechanism("induction", *RESTORED),
        "restoring the values' positions alone brings back 90 % of the answer, and as many other "
        "positions, the placebo, 5 %.",
        "directly",
    ),
    Case("planted", mechanism("induction", *RESTORED), "value restored after block 0 0.90 0.80 to"),
    Case(
        "planted",
        mechanism("induction", *RESTORED, later=2),
        "what lies two positions after each value's position gathers its key",
    ),
    # The best depth decides: at others it is less, and not all depths are tried in deep models.
    Case("planted", mechanism("direct", *LITTLE), "brings back at most 12 % of", "induction"),
    Case(
        "planted",
        mechanism("direct", *EXCHANGED, depths=2),
        "exchanging two values leaves 4 % of the answer, and exchanging other positions, the "
        "placebo, 96 %.",
        "brings back",
    ),
    Case("planted", mechanism("positional"), "20 % of the answers stay with the position and 70 %"),
    Case("null", mechanism("undecided"), "Not decided: this is why.", "It "),
    Case("boundary", mechanism("mixed", *LITTLE), "in more than one way: this is why.", "Not"),
    Case("boundary", mechanism("undecided", *RESTORED, half=math.nan), "0.90 unknown", "It "),
    Case("planted", components(0.5), "tried one at a time: 1 of 3; most"),
    Case("planted", components(0.5, 0.6), "layer 1's mixer at the keys 0.70 0.60 to 0.80 0.00"),
    Case(
        "null",
        components(0.0),
        "of the answer, tried one at a time: 0 of 3",
        "layer 0's mixer at the keys 0",
    ),
    Case("boundary", components(1 / 3), "tried one at a time: 0 of 3"),
    Case("planted", edited((0.1, 1)), "query → value blocked in layer 0 (0.10), value → key"),
    Case("null", edited((0.97, 1)), "query → value blocked in no layer", "in layer 0 (0."),
    Case("boundary", edited((0.8, 1)), "two values exchanged in no layer", "in layer 0 (0."),
    # Layer 1 has the least, and an interval that reaches the placebo's.
    Case("boundary", edited((0.6, 0.5), half=(0.1, 0.5)), "in layer 0 (0.60)", "in layer 1 (0.5"),
]

"""Findings of profiles, planted by hand."""

from analysis.profile.findings import (
    Abilities,
    AbilityCorrelations,
    AbilityMap,
    Costs,
    RecallCurves,
    RecallPerByte,
    correlate,
)
from analysis.profile.scores import AbilityScore
from lab.bench.speed import Speed
from lab.studies.profile import ABILITIES, CHOOSER
from tests.unit.analysis.case import Case

LENGTHS = ABILITIES[CHOOSER].lengths


def score(
    mixer: str, level: float, ability: str = CHOOSER, state: int | None = None
) -> AbilityScore:
    ends = level - 0.01, level + 0.01
    curve = {n: 1.0 if i <= 6 * level else 0.0 for i, n in enumerate(LENGTHS)}
    return AbilityScore(mixer, ability, level, ends, curve, 1000, state, 3, 1, 0)


def stand(own: float, *others: float) -> Abilities:
    rest = (score(f"m{i}", level) for i, level in enumerate(others))
    return Abilities("mine", (score("mine", own), *rest), ("m0",))


def recall(*levels: float) -> RecallCurves:
    scores = tuple(score(f"m{i}", level) for i, level in enumerate(levels))
    return RecallCurves(tuple(s.mixer for s in scores), scores)


def per_byte(*sizes: int) -> RecallPerByte:
    """Return mixers that recall 16 pairs each, with states of these sizes."""
    scores = (score(f"m{i}", 1 / 3, state=size) for i, size in enumerate(sizes))
    return RecallPerByte(tuple(scores), "m0")


def chart(*levels: float) -> AbilityMap:
    return AbilityMap(tuple(score(f"m{i}", level, "hops") for i, level in enumerate(levels)))


def together(*pairs: tuple[float, float]) -> AbilityCorrelations:
    scores = []
    for i, levels in enumerate(pairs):
        scores += [score(f"m{i}", x, key) for x, key in zip(levels, ("copy", "hops"), strict=True)]
    return correlate(scores)[0]


def costs(ours: float, decoding: float | None = 1e-5) -> Costs:
    made = [Speed("mine", n, ours, decoding) for n in (512, 8192)]
    return Costs((*made, *(Speed("attention", n, 1e-5, 1e-5) for n in (512, 8192))))


CASES = [
    Case("planted", stand(0.9, 0.5, 0.4), has="higher mean: 1 of 1", lacks="no other mixer to"),
    Case("null", stand(0.1, 0.5, 0.4), has="higher mean: 0 of 1", lacks="have: 1"),
    Case("boundary", stand(0.0), has="no other mixer to compare", lacks="higher"),
    Case("planted", recall(1.0, 1 / 3), has="m0 ≥ 256 pairs; m1 16 pairs", lacks="m2"),
    Case("null", recall(0.0), has="m0 < 4 pairs", lacks="≥"),
    Case("boundary", recall(1 / 6), has="m0 8 pairs", lacks="<"),
    Case("planted", per_byte(400, 100), has="m1, 16 pairs in 100 bytes", lacks="m0, 16"),
    Case("null", per_byte(100), has="known: 1", lacks="known: 2"),
    Case("boundary", per_byte(100, 100), "m0, 16 pairs in 100 bytes; m1, 16 pairs in 100 bytes."),
    Case("planted", chart(1.0, 0.0), has="two hops, by 100 %", lacks="recall"),
    Case("null", chart(0.5, 0.5), has="by 0 %", lacks="recall"),
    Case("boundary", chart(0.5), has="1 of 1", lacks="recall"),
    Case(
        "planted",
        together(*((i / 5, i / 5) for i in range(5))),
        has="copying and two hops (+1.00)",
        lacks="recall",
    ),
    Case(
        "null",
        together((0.0, 0.2), (0.1, 0.0), (0.2, 0.2), (0.3, 0.0), (0.4, 0.2)),
        has="(+0.00)",
        lacks="(+1.00)",
    ),
    Case(
        "boundary",
        together(*((i / 5, 1 - i / 5) for i in range(5))),
        has="(-1.00)",
        lacks="(+1.00)",
    ),
    Case("planted", costs(3e-5), has="3.00 ×", lacks="1.00 ×"),
    Case("null", costs(1e-5), has="1.00 ×", lacks="3.00 ×"),
    Case("boundary", costs(1e-5, None), has="–", lacks="nan"),
]

"""Layers, heads and products of layers with planted matrices."""

from dataclasses import replace

import numpy as np

from analysis.figures.picture import Heatmap, Picture
from analysis.links import AnswerLinks, Offsets
from analysis.matrices import LayerMatrix, Mass
from analysis.matrices.heads import PATTERNS, HeadReach, HeadScores
from analysis.matrices.rollout import Rollout
from tests.unit.analysis.case import Case

PAIRS = AnswerLinks(np.array([4, 6]), np.array([0, 2]), np.array([1, 3]))
READ, WRITTEN = replace(PAIRS, read=2), replace(PAIRS, written=2)
NONE = np.zeros(0, int)
NO_PAIRS = AnswerLinks(NONE, NONE, NONE)
PICTURE = Picture(np.where(np.tri(8, dtype=bool), 0.5, np.nan)[None])
ZEROS = np.zeros(8, int)
NAN = float("nan")


def layer(
    on_value: float, written: float, uniform: float = 0.2, links: AnswerLinks = PAIRS
) -> LayerMatrix:
    ends = np.array([on_value]), np.array([written]), np.zeros(1)
    return LayerMatrix(
        layer=0,
        mixer="Attention",
        form="A",
        picture=PICTURE,
        mass=Mass(*ends, uniform_value=uniform, uniform_written=uniform, uniform_previous=uniform),
        cropped=False,
        links=links,
        tokens=ZEROS,
        roles=ZEROS,
        role_names=("key",),
        title="Layer 0 · Attention · A",
        views={},
    )


def pairless(*on_previous: float) -> LayerMatrix:
    """Return a layer without pairs, by its heads' mass on the token before, if there is one."""
    none, heads = np.zeros(0), np.array(on_previous)
    mass = Mass(none, none, heads, uniform_value=0, uniform_written=0, uniform_previous=0.3)
    return replace(layer(0, 0), mass=mass, links=NO_PAIRS)


def scores(*shares: float, half: float = 0.05, rows: int = 8, read: int = 0) -> HeadScores:
    """Return heads of layer 0 by their share on induction, of which a uniform row has 20 %."""
    share = np.full((len(shares), 4), 0.2)
    share[:, 2] = shares
    return HeadScores(
        layers=np.zeros(len(shares), int),
        heads=np.arange(len(shares)),
        patterns=PATTERNS,
        shares=share,
        chance=np.full(4, 0.2),
        half_widths=np.full_like(share, half),
        moved_shares=np.full_like(share, NAN),
        rows=rows,
        offsets=Offsets(read={0: read}) if read else Offsets(),
    )


def reach(keys: tuple[float, float], distance: tuple[float, float]) -> HeadReach:
    return HeadReach(
        layers=np.zeros(2, int),
        heads=np.arange(2),
        effective_keys=np.array(keys),
        distance=np.array(distance),
        uniform_keys=8.5,
        uniform_distance=3.75,
    )


def rollout(low: float, high: float, links: AnswerLinks = PAIRS) -> Rollout:
    found = np.array([(low + high) / 2] * len(links.values))
    shown = Heatmap(PICTURE, links, ZEROS, ZEROS, ("key",))
    return Rollout(found, (low, high), 0.1, np.array([0.3]), 0.4, 4, shown, "Rollout")


CASES = [
    Case("planted", layer(1, 0.2), "It recalls: query rows put up to 100.0 % of their mass on the"),
    Case("planted", layer(0, 1), "It binds each value to its key", "recall"),
    Case(
        "planted", layer(1, 0, 0.2, READ), "what lies two positions after the value they ask for,"
    ),
    Case(
        "planted", layer(0, 1, 0.2, WRITTEN), "what lies two positions after a value puts up to 100"
    ),
    Case("null", layer(0.2, 0.2), "It shows neither recall nor binding"),
    # Of two pairs, uniform value rows have 37.5 % on their keys: most of the mass may lie there.
    Case("boundary", layer(0.1, 0.52, 0.375), "neither recall nor binding", "binds"),
    Case("boundary", replace(layer(1, 0), picture=None, mass=None), "offers no matrix", "recalls"),
    Case("planted", replace(layer(1, 0), cropped=True), "value 2 2", "recalls"),
    Case("boundary", replace(pairless(0.9), cropped=True), "Rows 0 to 7, columns 0 to 7", "quer"),
    Case("planted", pairless(0.9, 0.2), "Of a row's mass, up to 90.0 % is on the token before."),
    Case("boundary", pairless(), "The row is a single token.", "mass,"),
    Case("planted", scores(0.9, 0.2), "pattern: 1 of 2; at most, head 0.0 puts 90.0 %"),
    Case("planted", scores(0.9, read=2), "on what lies two positions after the token that"),
    Case("null", scores(0.2, 0.2), "pattern: 0 of 2;", "induction"),
    Case("boundary", scores(0.9, half=0.6), "pattern: 0 of 1; at most, head 0.0", "induction"),
    Case("boundary", scores(0.9, half=NAN, rows=1), "Undecided, because one row", "pattern"),
    Case("null", scores(NAN), "at most, head 0.0 puts 20.0 % of its mass on the token before"),
    Case(
        "null", replace(scores(0.9), shares=np.full((1, 4), NAN)), "No head has any mass.", "puts"
    ),
    Case("planted", reach((2, 8), (1, 3)), "2 of 2, spread over 2 to 8 effective keys (uniform"),
    Case(
        "planted", reach((2, 8), (3, 1)), "and look 1 to 3 tokens back on average (uniform: 3.75)"
    ),
    Case("null", reach((8.5, 8.5), (3.75, 3.75)), "over 8.5 effective keys (uniform rows: 8.5)"),
    Case("null", reach((NAN, NAN), (NAN, NAN)), "No head has any mass.", "effective"),
    Case("boundary", reach((2, NAN), (3, NAN)), "1 of 2, spread over 2 effective keys"),
    Case("planted", rollout(0.21, 0.4), "Recall shows: through all layers", "uncertain"),
    Case("null", rollout(0.1, 0.19), "No recall shows: through all layers"),
    Case("boundary", rollout(0.1, 0.4), "It is uncertain whether recall shows"),
    Case(
        "boundary",
        replace(rollout(0.1, 0.4), interval=(NAN, NAN)),
        "It is uncertain whether recall shows",
        "No recall",
    ),
    Case("boundary", rollout(NAN, NAN, NO_PAIRS), "positions to themselves 30.0 %", "shows"),
]

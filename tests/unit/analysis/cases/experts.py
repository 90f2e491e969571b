"""Findings about experts: their load, map, pairs, roles, deletions, answers and course."""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from analysis.experts.key_map import CoActivation, LayerPairs, LoadMap
from analysis.experts.knockout import (
    AnswerChange,
    Deletion,
    LayerKnockout,
    RoleDeletion,
    RoleEffects,
)
from analysis.experts.load import ExpertChoices, LoadByRank, LoadComparison, measure_load
from analysis.experts.roles import RolePreferences, measure_preferences
from analysis.experts.storage import HeldAnswers, Holder
from analysis.experts.training import Course
from tests.unit.analysis.case import Case

RNG = np.random.default_rng(0)


def choose(indices: np.ndarray, n_experts: int) -> ExpertChoices:
    """Return the choices [n h k] of a layer, without ties."""
    n, h, _ = indices.shape
    parts = (
        indices.astype(np.int32),
        np.ones(indices.shape),
        np.ones((n, h)),
        np.zeros((n, h), bool),
    )
    return ExpertChoices(0, "CDMoE", n_experts, *parts, np.arange(n))


def choose_randomly(tokens: int, heads: int, k: int, n_experts: int) -> ExpertChoices:
    order = np.argsort(RNG.random((tokens, heads, n_experts)), axis=-1)
    return choose(order[..., :k], n_experts)


def map_load(information: float, *, constant: bool = False) -> LoadMap:
    """Return a map of 2 × 3 experts, whose shuffled information is 0.1 nats."""
    share = np.full(2, 1 / 2), np.full(3, 1 / 3)
    numbers: Any = (5, constant, constant, 40, information, information, 0.1, 9, 0.7)
    shown: Any = (*share, *numbers, np.array([[9, 8, 7], [6, 10, 0]]), "Load on the grid")
    return LoadMap(0, 20, *shown)


def together(excess: float, layer: int = 0) -> LayerPairs:
    """Return a layer whose mean PMI exceeds that of the shuffles by this much."""
    bars = np.full(140, 1 / 140)
    found: Any = (None, np.zeros(19), 0.2, 0.2, np.zeros(0, int), None, bars, bars)
    return LayerPairs(layer, 9, excess, *found)


def reveal(share: float) -> RolePreferences:
    """Return what choices tell about two roles, if this share of them is the role's own expert."""
    roles = np.arange(400) % 2
    own = RNG.random(400) < share
    experts = np.where(own, roles, RNG.integers(2, size=400))
    return measure_preferences([choose(experts[:, None, None], 2)], roles, ("key", "value"), 0)


def change(loss: float, half: float = 0.05) -> AnswerChange:
    return AnswerChange(loss, (loss - half, loss + half), 0.0, (-half, half))


def knock_out(
    loaded: float,
    twin: float,
    twins: int = 2,
    half: float = 0.05,
    roles: Mapping[str, AnswerChange] = MappingProxyType({}),
) -> LayerKnockout:
    found = [Deletion((0, 0), False, 0.1, 0.1, change(loaded, half))]
    found += [Deletion((0, 1), True, 0.1, 0.1, change(twin, half))] * twins
    at = tuple(RoleDeletion(role, 9, found, found) for role, found in roles.items())
    ends: Any = (tuple(found), change(loaded, half), {}, at, 0, 0.0, "Loss without one expert")
    return LayerKnockout(0, 16, 20, 40, 1.0, 0.5, *ends)


def compare_roles(**changes: AnswerChange) -> RoleEffects:
    return RoleEffects((knock_out(0.0, 0.0, roles=changes),))


def hold(count: int, holders: int, halved: int) -> HeldAnswers:
    """Return 96 answers, of which single experts hold this many."""
    top = tuple(Holder((0, i), count // holders, ((3, 2),)) for i in range(holders))
    numbers = halved, 0, 96, (0.99, 2.0), holders, "token", math.nan, math.nan, 0, top
    effects = np.ones(96), np.ones(96) / 9, np.arange(96) < count
    ends: Any = (*numbers, *effects, "Which expert holds which answer")
    return HeldAnswers(0, 96, count, *ends)


def follow(standing: list[float], uniform: float = 0.0) -> Course:
    """Return the course of two layers, the first of which has these standing experts."""
    effective = np.array([[3.0, 40.0, 5.0, 30.0], [3.0, 40.0, 39.0, 41.0]])
    return Course(
        steps=np.array([0, 10, 20, 30]),
        layers=np.array([2, 5]),
        n_experts=np.array([42, 42]),
        effective=effective,
        used=effective / 42,
        standing=np.array([standing, [1.0, 0.0, 0.0, 0.0]]),
        membership=np.array([[0.0, 0.1, 0.4, 1.0], [0.0, 0.1, 0.2, 1.0]]),
        saturation=np.array([[0.1, 0.2, 0.3, 1.0], [0.1, 0.6, 0.7, 1.0]]),
        effective_uniform=np.array([41.5, 41.5]),
        used_uniform=np.ones(2),
        standing_uniform=np.full(2, uniform),
        standing_chance=np.full(2, float(uniform > 0)),
        membership_uniform=np.full(2, 0.04),
        saturation_uniform=np.full(2, 3 / 42),
    )


COLLAPSED = measure_load(choose(np.tile([[[1, 2]]], (300, 1, 1)), 40), 0)
UNIFORM = measure_load(choose_randomly(300, 2, 2, 40), 0)
# A token gets eight times two of four experts: chance alone leaves hardly anything else.
CROWDED = measure_load(choose_randomly(300, 8, 2, 4), 0)
ONE, NO = "and one expert stands out", "and no single expert stands out"
BEYOND, SILENT = "Experts are chosen together beyond chance", "No layer is seen to choose experts"
CASES = [
    Case("planted", LoadByRank((COLLAPSED,)), "Collapsed: in layer 0 nearly every token", "least"),
    Case("null", LoadByRank((UNIFORM,)), "(random choice: 3", "Collapsed"),
    Case("boundary", LoadByRank((CROWDED,)), "uses its 4 experts like", "Collapsed"),
    Case("boundary", LoadByRank((UNIFORM, COLLAPSED)), "which hold 100.0 % of layer 0's choices"),
    Case(
        "planted",
        LoadComparison((COLLAPSED,)),
        "100.0 % of layer 0's choices, more than",
        "no more",
    ),
    Case("null", LoadComparison((UNIFORM,)), "no more than chance can give"),
    Case("boundary", LoadComparison((CROWDED,)), "no more than chance can give"),
    Case("planted", map_load(0.5), "beyond chance: I(row; column) = 0.500", "no better"),
    Case("null", map_load(0.05), "no better than by chance", "beyond"),
    Case("boundary", map_load(0.1), "no better than by chance", "beyond"),
    Case("boundary", map_load(0.5, constant=True), "20 tokens chooses the same 5 of 6", "predicts"),
    Case("planted", CoActivation((together(1.5),)), f"{BEYOND}, most in layer 0", "No layer"),
    Case("planted", CoActivation((together(1.5), together(2, 3))), f"{BEYOND}, most in layer 3"),
    Case("null", CoActivation((together(0.0),)), SILENT, "Experts are"),
    # Beyond all shuffles, and yet 1.00 times independence.
    Case("boundary", CoActivation((together(0.002),)), SILENT, "Experts are"),
    Case("boundary", CoActivation((replace(together(0.0), distinct=0),)), "there are no pairs."),
    Case("planted", reveal(1.0), "reveals the role of a token: I = 0.69", "not seen"),
    Case("null", reveal(0.0), "is not seen to reveal the role", "reveals"),
    Case("boundary", reveal(0.05), "is not seen to reveal the role", "reveals"),
    Case("planted", knock_out(0.5, 0.1), f"{ONE} among the most loaded: deleting (0, 0)"),
    Case("null", knock_out(0.0, 0.0), "show no effect: deleting all 16 changes the loss by +0 "),
    # Its interval holds the twins' effect, so that one of them could be as harmful.
    Case("boundary", knock_out(0.12, 0.1), NO, ONE),
    Case("boundary", knock_out(0.5, 0.1, twins=0), "the worst of 0 twins by –"),
    Case("boundary", knock_out(0.5, 0.1, half=math.nan), "[one row: no interval]", ONE),
    Case("boundary", knock_out(0.0, 0.0, half=0.001), "hardly matter to the answers"),
    Case("planted", compare_roles(key=change(0.5), value=change(0.1)), "needed most at key tokens"),
    Case("null", compare_roles(key=change(0.0), value=change(0.0)), "No role is seen to", "most"),
    Case(
        "boundary",
        compare_roles(key=change(0.5), value=change(0.45)),
        "needed at key tokens in layer 0",
        "most",
    ),
    Case("boundary", compare_roles(key=change(0.5, math.nan)), "No role is seen", "needed"),
    Case("planted", hold(96, 16, 96), "Answers are held by one expert alone: 96 of 96", "Hardly"),
    Case("null", hold(0, 1, 0), "Hardly any answer is held by one expert alone: 0 of 96"),
    # Experts that answers need two by two: each halves them, and none holds them alone.
    Case("boundary", hold(0, 1, 90), "that matters most 90 are half as likely", "Answers are held"),
    Case("boundary", hold(1, 1, 1), "Hardly any answer is held by one expert alone: 1 of 96"),
    Case(
        "planted",
        follow([1.0, 0.0, 0.75, 0.025]),
        "holds 75.0 % of layer 2's choices at step 20, and 2.5 % at the end (random choice: 0.0 %)",
    ),
    Case("planted", follow([1.0, 0.0, 0.2, 0.3]), "holds 30.0 % of layer 2's choices at step 30"),
    Case("null", follow([0.0, 0.0, 0.0, 0.0]), "30 at step 30 (random choice: 42", "coalition"),
    # Few of the choices; or as many as random choice gives.
    Case("boundary", follow([0.0, 0.0, 0.05, 0.0]), "The least even layer, layer 2", "coalition"),
    Case("boundary", follow([1.0, 1.0, 1.0, 1.0], 0.996), "The least even layer", "coalition"),
]

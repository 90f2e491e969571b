"""What states keep, planted by hand."""

import math
from dataclasses import replace

import numpy as np

from analysis.figures.picture import Heatmap, Picture
from analysis.links import AnswerLinks
from analysis.state_space import (
    LEAST,
    QUANTITIES,
    Contexts,
    Magnitudes,
    RoleMeans,
    StateMemory,
)
from analysis.state_space.erasure import Erasures, Turnover
from analysis.state_space.rank import StateSpectrum
from analysis.state_space.rewrites import AFTER, BEFORE, Held, Silenced
from tests.unit.analysis.case import Case

NONE = math.nan, math.nan
ZERO = float(np.log10(LEAST))


def name_heads(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the layer and the index of each of some heads of one layer."""
    return np.zeros(count, int), np.arange(count)


def memory(lives: tuple[float, ...], initial: StateMemory | None = None) -> StateMemory:
    third, windows = np.full(len(lives), 1 / 3), np.linspace(3, 9, len(lives))
    heads = name_heads(len(lives))
    return StateMemory(*heads, np.array(lives), windows, third, 9.0, initial)


def contexts(*last: float) -> Contexts:
    uniform, windows = np.array([1.0, 15.0]), np.stack([np.ones(len(last)), last], 1)
    return Contexts(*name_heads(len(last)), np.array([0, 15]), windows, uniform)


def writes(*by_role: tuple[float, ...]) -> RoleMeans:
    """Return heads by what they write at tokens of each role."""
    means = np.ones((4, len(by_role[0]), len(by_role)))
    means[2] = np.array(by_role).T
    roles = ("key", "value", "filler")[: len(by_role[0])]
    return RoleMeans(*name_heads(len(by_role)), roles, QUANTITIES, means)


def stepless(*by_role: tuple[float, ...]) -> RoleMeans:
    """Return the same of heads without a step."""
    found = writes(*by_role)
    found.means[0] = math.nan
    return found


def undivided(lives: tuple[float, ...]) -> StateMemory:
    """Return heads whose matrix is no product of content and decay."""
    return replace(memory(lives), decay=np.full(len(lives), math.nan))


def heatmap(heads: int = 1) -> Heatmap:
    none, tokens = np.zeros(0, int), np.zeros(8, int)
    picture = Picture(np.tile(np.tri(8), (heads, 1, 1)), 1, (0, 0), 1.0, signed=False)
    return Heatmap(picture, AnswerLinks(none, none, none), tokens, tokens, ("key",))


def magnitudes(largest: float, median: float) -> Magnitudes:
    return Magnitudes("Layer 0", 0, largest, largest - 1, median, 0.0, heatmap())


def turnover(*erased: float) -> Turnover:
    """Return heads by what value tokens erase; β is 1 there and 0 at keys."""
    means = np.zeros((5, 2, len(erased)))
    means[2, 1], means[3:, 1] = erased, 1
    return Turnover(*name_heads(len(erased)), ("key", "value"), means)


def erasures(largest: float, *by_value: float) -> Erasures:
    """Return heads of which value tokens erase these shares of what values wrote; half decays."""
    written = np.tile([0.0, 1.0], (len(by_value), 1))
    erased = np.zeros((2, len(by_value), 2))
    erased[1, :, 1] = by_value
    left = 0.5 - erased.sum(0)
    heads = heatmap(len(by_value))
    decayed = np.full_like(left, 0.5)
    return Erasures("Layer 0", 0, ("key", "value"), written, left, decayed, erased, largest, heads)


def held(old: float, erased: tuple[float, float], width: float = 0.01) -> Held:
    """Return two heads, of which the second holds so much of an old value, and 90 % of others."""
    places = np.arange(-BEFORE, AFTER + 1)
    shares = np.ones((2, 2, len(places)))
    shares[1, 0, BEFORE:], shares[1, 1, BEFORE:] = old, 0.9
    taken = np.array([(0.0, 0.0), erased])
    ends = np.array([-width, width])
    around, of_taken = shares[..., None] + ends, taken[..., None] + ends
    return Held(*name_heads(2), places, shares, around, taken, of_taken)


def silenced(stale: float, placebo: float = 0.02) -> Silenced:
    """Return two layers, of which the second makes so many answers stale without its writes."""
    found, others = np.full((2, 2, 2, 2), 0.01), np.full((2, 2, 2, 2), placebo)
    found[0, 0, 1, 1] = stale
    shares, around = found[0], found[0][..., None] + np.array([-0.01, 0.01])
    beside, of_beside = others[0], others[0][..., None] + np.array([-0.01, 0.01])
    return Silenced(np.arange(2), np.array([0.99, 0.01]), shares, around, beside, of_beside, 64)


def spectrum(effective: tuple[float, ...], rank: tuple[float, ...]) -> StateSpectrum:
    count = len(rank)
    cuts, bound, before = np.array([8]), np.full((1, count), 8), np.full((1, count), math.nan)
    found, values = np.array([effective]), np.tile(2.0 ** -np.arange(8), (count, 1))
    heads = name_heads(count)
    return StateSpectrum(*heads, cuts, bound, np.array([rank]), found, before, values)


MANY = tuple(np.linspace(2, 7, 40))
CASES = [
    Case("planted", memory((2, 8)), "Half-lives in tokens: 2 to 8; effective contexts: 3 to 9 ("),
    Case("planted", memory((2, 8), memory((4, 6))), "half-life, step 0 4 (head 0.0) 6 (head 0.1)"),
    Case("null", memory((math.inf, math.inf)), "in tokens: none; effective", "head 0.0) 2"),
    Case("boundary", memory((5, 5.0001)), "in tokens: 5; effective", "to 5"),
    Case("boundary", memory((2, math.inf)), "heads that never forget: 1 of 2."),
    Case(
        "boundary", memory((2, math.inf), memory((math.inf, 2))), "half-life, step 0 2 (head 0.1)"
    ),
    Case("boundary", memory(MANY), "in tokens: 2 to 7;"),
    Case("planted", contexts(4, 15), "last position, 15: 4 to 15 tokens (uniform matrix: 15)"),
    Case("null", contexts(13.5, 13.5), "last position, 15: 13.5 tokens", " to "),
    Case("boundary", contexts(4, 4.001), "last position, 15: 4 tokens", "to 4"),
    Case("boundary", contexts(*MANY), "last position, 15: 2 to 7 tokens"),
    Case("planted", writes((1, 4), (1, 1)), "at those of another: 1 of 2."),
    Case("null", writes((0, 0)), "at those of another: 0 of 1."),
    Case("null", writes((1,)), "at those of another: 0 of 1."),
    Case("boundary", writes((2, 2.99), (2, 3)), "at those of another: 1 of 2."),
    Case("boundary", writes((1, 1), (0, 4)), "head 0.1 step dt kept e^a written read\nkey 1 1 0 1"),
    Case("boundary", stepless((1, 4)), "step dt kept e^a written read\nkey – 1 1 1"),
    Case("boundary", undivided((2, 8)), "Half-lives in tokens: 2 to 8; effective contexts: 3 to 9"),
    Case("planted", magnitudes(0.0, -2.0), "Half of the cells lie 2 decades or more below"),
    Case("null", magnitudes(ZERO, ZERO), "All cells are 0.", "largest"),
    Case("boundary", magnitudes(0.0, 0.0), "lie 0 decades or more below the largest, 1;"),
    Case("planted", spectrum((2, 7), (3, 8)), "past token 8: 2 to 7 of at most 8."),
    Case("null", spectrum((5, 5), (8, 8)), "past token 8: 5 of at most 8.", " to "),
    Case("null", spectrum(NONE, (0, 0)), "Nothing is carried past token 8: all entries"),
    Case("boundary", spectrum((2, math.nan), (3, 0)), "carry nothing 1 of 2"),
    Case("boundary", spectrum((2, 7), (3, 7.6)), "numerical rank full in every row 0 of 2"),
    Case("boundary", spectrum(MANY, MANY), "highest effective rank 0.39 7 –"),
    Case("planted", turnover(0.2, 0.5), "that erase: 2 of 2; head 0.1 erases most: a value token"),
    Case("planted", turnover(0.2, 0.5), "value 0.0 % 0.0 % 50.0 % 100.0 % 1"),
    Case("null", turnover(0, 0), "that erase: 0 of 2: what is written stays", "erases most"),
    Case("boundary", turnover(0.01, 0.0101), "Heads that erase: 1 of 2; head 0.1 erases most"),
    Case("planted", erasures(0.9, 0.1, 0.4), "head 0.1 writes, later tokens erase 40.0 %, value t"),
    Case("planted", erasures(0.9, 0.1, 0.4), "value 100.0 % 10.0 % 50.0 % 0.0 % 40.0 %"),
    Case("null", erasures(0.0, 0, 0), "No token of this layer erases what another has", "later"),
    Case("boundary", erasures(0.0101, 0.4, 0.4), "Of all that head 0.0 writes, later tokens erase"),
    Case("planted", held(0.03, (0.8, 0.1)), "Head 0.1 holds 3.0 % of an old value 8 tokens after"),
    Case("planted", held(0.03, (0.8, 0.1)), "head 0.1 old value 3.0 % 80.0 % 17.0 %"),
    Case("null", held(0.9, (0, 0)), "No head surely erases more of an old value", "Head 0"),
    Case("null", held(math.nan, NONE), "later, head 0.0 holds 100.0 % of it"),
    Case("boundary", held(0.3, (0.11, 0.1)), "No head surely erases more", "Heads that surely"),
    Case("boundary", held(0.3, (0.13, 0.1)), "surely erase more of the old value: 1 of 2."),
    Case("planted", silenced(0.8), "nor erase, they are 80.0 % in layer 1 (placebo 2.0 %)"),
    Case(
        "null", silenced(0.01), "they are in no layer surely more than its placebo; if", "layer 1 ("
    ),
    Case("boundary", silenced(0.04), "they are in no layer surely more", "layer 1 ("),
    Case("boundary", silenced(0.0401), "they are 4.0 % in layer 1 (placebo 2.0 %)"),
]

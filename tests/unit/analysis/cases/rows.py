"""Rows, answers by place, continuations and capacities, planted."""

from dataclasses import replace
from typing import Any

import numpy as np

from analysis.capacity import Capacity
from analysis.rows import RowLayout
from analysis.rows.positions import AccuracyByPlace, ErrorByPosition
from analysis.rows.samples import Continuations, Legal
from analysis.rows.tokens import Looks, TokenRow
from analysis.statistics.comparisons import Bins
from lab.intervals import Estimate
from tests.unit.analysis.case import Case

NAN = float("nan")


def layout(*scored: float) -> RowLayout:
    """Return a row of four keys and four queries by how many positions of each are scored."""
    cells, text = np.repeat([0, 1], 4)[None], (tuple("abcdefgh"),)
    counts = np.full(2, 4.0), float(sum(scored)), np.array(scored)
    return RowLayout(8, ("key", "query"), *counts, 0, 8, cells, text, text, "Rows")


def row(right: int, shown: int = 4, heads: tuple[Looks, ...] = ()) -> TokenRow:
    """Return a row of four tokens and three questions, by how many tokens are shown."""
    asked = ("b",) * (shown - 1) + ("",)
    text = tuple(range(shown)), ("a",) * shown, (0,) * shown, asked, asked
    return TokenRow(4, 3, right, ("key",), heads, *text, (), "Row 0")


def binned(*shares: float, half: float = 0.1) -> Bins:
    accuracy = np.array(shares)
    first = 4 * np.arange(len(shares))
    interval = np.stack([accuracy - half, accuracy + half], 1)
    return Bins(first, first + 3, accuracy, interval, np.full(len(shares), 50))


def placed(position: Bins | None, role: Bins | None = None) -> AccuracyByPlace:
    roles = ("query",) if role is None else ("marker", "echo")
    return AccuracyByPlace(8, 100, 0.7, (0.6, 0.8), 0.1, position, roles, role)


def errors(*error: float) -> ErrorByPosition:
    """Return errors at positions 0, 2, …, where the oracle's fall from 1 to 0."""
    n, found = len(error), np.array(error)
    ends = np.stack([found - 0.1, found + 0.1], 1)
    rules = {"oracle": np.linspace(1, 0, n), "averaging": np.full(n, 2.0)}
    return ErrorByPosition(8, 2 * np.arange(n), found, ends, rules, 1.0)


def texts(bits: float, half: float = 0.1, **changed: Any) -> Continuations:
    ends = Estimate(bits, bits - half, bits + half, 8.0)
    return replace(Continuations("byte", 8, 99, ends, ends, (), None), **changed)


def capacity(*accuracy: float, first: int = 1) -> Capacity:
    n, shares = len(accuracy), np.array(accuracy)
    ends = np.stack([shares - 0.1, shares + 0.1], 1)
    pairs = first * 2 ** np.arange(n)
    return Capacity(pairs, shares, ends, np.full(n, 0.1), np.ones(n, int), 0.99)


HALF = Looks(0, 0, "Attention", np.zeros((4, 2), int), np.zeros((4, 2)), np.zeros(4))
CASES = [
    Case("planted", layout(0, 4), "Scored positions of a row: 4 of 8 (50.0 %)."),
    Case("planted", layout(0, 2.5), "query 4 2.5", "key 4 1"),
    Case("null", layout(0, 0), "query 4 0"),
    Case("planted", row(2), "answers 2 of 3 questions of this row right.", "shown"),
    Case("null", row(0), "answers 0 of 3 questions"),
    Case("boundary", row(2, shown=3), "tokens 3 4", "entries"),
    Case("boundary", row(2, heads=(HALF,)), "entries of a row of a matrix, at most 2 4", "tokens"),
    Case("planted", placed(binned(0.9, 0.7, 0.2)), "90.0 % at positions 0–3 against 20.0 % at"),
    Case("planted", placed(None, binned(0.9, 0.4)), "90.0 % at “marker” against 40.0 %"),
    Case("planted", placed(binned(0.9, 0.4), binned(0.9, 0.4)), "echo 40.0 % 30.0 % to 50.0 % 50"),
    Case("null", placed(binned(0.9, 0.9)), "(chance: 10.0 %): no position stands out.", "against"),
    Case("boundary", placed(None, binned(0.9, 0.8)), "no role stands out.", "against"),
    Case("planted", errors(1, 0.5, 0.1), "0.100 at position 4 (oracle 0.000); answering zero"),
    Case("null", errors(1, 1, 1), "1.000 at position 0 (oracle 1.000) and 1.000 at position 4"),
    Case("boundary", errors(1), "The squared error is 1.000 at position 0 (oracle 1.000); ", "and"),
    Case("planted", texts(2.0), "A byte takes 2 bits, a perplexity of 2; a uniform guess takes 8"),
    Case("planted", texts(2.0, legal=Legal(0.9, (0.8, 1.0), 0.1)), "allows 90.0 % 80.0 % to 100"),
    Case("null", texts(8.0), "takes 8 bits, a perplexity of 8; a uniform guess takes 8 bits."),
    Case("boundary", texts(2.0, half=NAN), "bits per byte 2 – 8"),
    Case("planted", texts(2.0, references={"5-gram": 2.25}), "takes 8 bits, 5-gram 2.25."),
    Case("boundary", texts(2.0, why="no"), "bits; there are no continuations: no."),
    Case("planted", capacity(1, 1, 0.5), "Learned to 99.0 % up to K = 2, of 3 tried."),
    Case("null", capacity(0.1, 0.1, first=2), "Not learned to 99.0 % even at K = 2."),
    Case("boundary", capacity(1, 0.98996), "Learned to 99.000 % up to K = 1", "99.0 %"),
    # A number that is learned after one that is not counts for nothing.
    Case("boundary", capacity(0.99, 0.5, 0.99), "up to K = 1, of 3 tried"),
]

"""Language: automata, strings, roles, links, oracle, shortcuts and the limits of its options."""

from itertools import combinations
from math import sqrt

import pytest
import torch

from tasks.base import IGNORE, Batch, accuracy
from tasks.language import BETWEEN, PADDING, SEPARATOR, SYMBOL, Language
from tests.statistics import assert_uniform


def strings(batch: Batch, row: int) -> list[list[int]]:
    """Return the strings of a row, the last one cut where the row is."""
    found: list[list[int]] = [[]]
    for token, role in zip(batch.inputs[row].tolist(), batch.roles[row].tolist(), strict=True):
        if role == BETWEEN:
            found.append([])
        elif role == SYMBOL:
            found[-1].append(token)
    return found


def test_roles_are_strings_with_separators_between_and_padding_behind():
    task = Language(seq_len=300, min_strings=3, max_strings=5, max_length=8)
    batch = task.batch(size=3_000)
    count, length = [], []
    for row in range(3_000):
        found = strings(batch, row)
        count.append(len(found))
        length += map(len, found)
        used = sum(map(len, found)) + len(found) - 1
        assert (batch.roles[row, used:] == PADDING).all()
    assert_uniform(torch.tensor(count), 3, 6)
    assert_uniform(torch.tensor(length), 1, 9)
    assert ((batch.inputs == SEPARATOR) == (batch.roles != SYMBOL)).all()


def test_scored_is_what_comes_next_where_it_is_a_symbol():
    batch = Language(seq_len=100).batch(size=200)
    following, is_symbol = batch.inputs[:, 1:], batch.roles[:, 1:] == SYMBOL
    assert batch.targets[:, :-1].equal(following.where(is_symbol, IGNORE))
    # The last position's target is the next token of the uncut row.
    longer = Language(seq_len=120).batch(size=200)
    assert longer.inputs[:, :100].equal(batch.inputs)
    assert longer.targets[:, 99].equal(batch.targets[:, 99])


@pytest.mark.parametrize(
    ("seq_len", "max_length"), [(2, 1), (8, 1), (9, 1), (9, 3), (40, 3), (41, 40)]
)
def test_strings_that_a_row_has_no_room_for_change_nothing(seq_len: int, max_length: int):
    task = Language(seq_len=seq_len, min_strings=60, max_strings=100, max_length=max_length)
    batch, longer = task.batch(size=50), task.replace(seq_len=200).batch(size=50)
    assert batch.inputs.equal(longer.inputs[:, :seq_len])
    assert batch.targets.equal(longer.targets[:, :seq_len])
    assert batch.roles.equal(longer.roles[:, :seq_len])
    assert batch.links["state"].equal(longer.links["state"][:, :seq_len])


def test_automata_are_drawn_as_said():
    task = Language(seq_len=2, min_states=4, max_states=8, n_symbols=10)
    links = task.batch(size=8_000).links
    symbol, following = links["symbol_of"], links["next_state"]
    assert ((symbol == -1) == (following == -1)).all()
    n_edges = (symbol >= 0).sum(2)
    n_states = (n_edges > 0).sum(1)
    assert_uniform(n_states, 4, 9)
    # A state of four has three others, one of more has edges to four of them at most.
    assert_uniform(n_edges[n_states == 4][:, :4], 1, 4)
    assert_uniform(n_edges[n_states == 8], 1, 5)
    state = torch.arange(8)[:, None]
    assert (following < n_states[:, None, None]).all()
    assert (following != state).all()
    for a, b in combinations(range(4), 2):
        both = symbol[:, :, b] >= 0
        assert (symbol[:, :, a] != symbol[:, :, b])[both].all()
        assert (following[:, :, a] != following[:, :, b])[both].all()
    for edge in range(4):
        there = following[n_states == 8, 0, edge]
        assert_uniform(there[there >= 0], 1, 8)
        written = symbol[:, 0, edge]
        assert_uniform(written[written >= 0], 1, 11)


@pytest.mark.parametrize("max_length", [15, 1024])
def test_every_string_is_a_walk_from_state_0(max_length: int):
    batch = Language(seq_len=200, max_length=max_length).batch(size=300)
    edge_drawn: list[float] = []
    for row in range(300):
        symbols, states = (batch.links[n][row].tolist() for n in ("symbol_of", "next_state"))
        for string in strings(batch, row):
            state = 0
            for token in string:
                edge = symbols[state].index(token)
                n_edges = sum(symbol >= 0 for symbol in symbols[state])
                edge_drawn += [edge] if n_edges == 4 else []
                state = states[state][edge]
    assert_uniform(torch.tensor(edge_drawn, dtype=torch.int64), 0, 4)


def test_links_say_the_state_and_what_is_legal():
    batch = Language().batch(size=50)
    state, legal = batch.links["state"], batch.links["legal"]
    scored = batch.targets != IGNORE
    assert ((state >= 0) == scored).all()
    assert (legal[~scored] == -1).all()
    assert (legal == batch.targets[:, :, None]).any(2)[scored].all()
    for row, position in scored.nonzero()[::97].tolist():
        symbols = batch.links["symbol_of"][row, state[row, position]]
        assert legal[row, position].equal(symbols)
    assert (state[:, :-1][batch.roles[:, :-1] == BETWEEN] == 0).all()


def test_the_oracle_is_right_as_often_as_a_state_allows():
    batch = Language().batch(split="test", size=500)
    scored, legal = batch.targets != IGNORE, batch.links["legal"]
    share = 1 / (legal >= 0).sum(2)[scored].double()
    answers = Language().oracle(batch)
    lowest = legal.where(legal >= 0, 99).min(2).values
    assert answers[scored].equal(lowest[scored])
    spread = 5 * (share * (1 - share)).sum().sqrt().item() / len(share)
    assert accuracy(answers, batch.targets) == pytest.approx(share.mean().item(), abs=spread)
    assert share.mean().item() == pytest.approx(0.54, abs=0.02)


def test_shortcuts_score_what_they_say():
    task = Language()
    batch = task.batch(split="test", size=200)
    scored = batch.targets != IGNORE
    for name, score in (("unigram", 0.27), ("bigram", 0.43), ("trigram", 0.47)):
        right = (task.shortcuts()[name](batch) == batch.targets) & scored
        by_row = right.sum(1) / scored.sum(1)
        spread = 5 * by_row.std().item() / sqrt(200)
        assert right.sum().item() / scored.sum().item() == pytest.approx(score, abs=spread), name


def test_shortcuts_count_what_came_before_in_the_row():
    batch = Language(seq_len=100, min_states=8, n_symbols=5, max_length=9).batch(size=5)
    for name, rule in Language().shortcuts().items():
        assert rule(batch).tolist() == [reference(row, name) for row in batch.inputs.tolist()]


def reference(row: list[int], name: str) -> list[int]:
    """Count each position's past anew."""
    answers = []
    for position in range(len(row)):
        past = row[: position + 1]
        for n in range(["unigram", "bigram", "trigram"].index(name), -1, -1):
            behind = past[len(past) - n :]
            came = [past[i] for i in range(n, len(past)) if past[i - n : i] == behind and past[i]]
            if n <= len(past) and came:
                answers.append(max(sorted(set(came)), key=came.count))
                break
        else:
            answers.append(IGNORE)
    return answers

"""The map of experts and their pairs: against loops, independence, and what was planted."""

import math
from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from analysis.base import NotApplicableError, Subject
from analysis.experts import key_map
from analysis.experts.key_map import (
    LoadMap,
    count_pairs,
    draw_tokens,
    exchange_ids,
    find_coalition,
    map_load,
    measure,
    measure_co_activation,
    measure_pairs,
)
from analysis.experts.load import ExpertChoices
from analysis.plain import to_plain
from lab.models import build
from tasks.mqar import MQAR

TASK = MQAR(seq_len=16, n_pairs=4, vocab_size=32)
SILENT = "No layer is seen to choose experts together beyond chance"


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def cells_of(fig: go.Figure | None) -> np.ndarray:
    assert fig is not None
    trace: Any = fig.data[0]
    return trace.z


def of(
    experts: np.ndarray,
    shape: tuple[int, int] = (4, 8),
    layer: int = 0,
    ids: np.ndarray | None = None,
) -> ExpertChoices:
    """Return choices, each of a token of its own unless ids tell."""
    own = np.arange(len(experts)) if ids is None else ids
    blank = np.zeros((len(experts), 1))
    parts = experts[:, None], experts[:, None] * 0.0, blank, blank > 0
    return ExpertChoices(layer, "CDMoE", math.prod(shape), *parts, own, shape)


def of_ids(seed: int, slots: int, n_ids: int = 200, tokens: int = 4000) -> ExpertChoices:
    """Return choices that follow from the id alone, with row and column drawn apart for each."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(n_ids, size=tokens)
    scores = rng.normal(size=(n_ids, 12, 1)) + rng.normal(size=(n_ids, 1, 12))
    experts = np.argsort(-scores.reshape(n_ids, -1), axis=1)[:, :slots]
    return of(experts[ids], (12, 12), ids=ids)


def random_choices(tokens: int, slots: int, n_experts: int) -> np.ndarray:
    """Return distinct experts for every token, each drawn alike."""
    return np.argsort(rng().random((tokens, n_experts)), axis=1)[:, :slots]


def subject(stack: str = "AP AE", options: dict[str, object] | None = None) -> Subject:
    model = build(stack, vocab_size=32, d_model=16, options=options, seed=1).eval()
    return Subject(TASK, model, TASK.batch(split="test", size=4))


def test_the_map_counts_every_choice():
    found = subject(options={"P.n_experts": 32, "E.n_experts": 24, "E.k": 3})
    *maps, together = measure(found)
    assert together.figure() is not None
    assert "counts" not in to_plain(maps[0])
    for layer, result in enumerate(maps):
        assert isinstance(result, LoadMap)
        name = f"blocks.{layer}.mlp.hook_expert_indices"
        cache = found.model.run_with_cache(found.batch.inputs, name)[1]
        rows, columns = result.counts.shape
        expected = np.zeros((rows, columns), np.int64)
        for expert in cache[name].flatten().tolist():
            expected[expert // columns, expert % columns] += 1
        np.testing.assert_array_equal(result.counts, expected)
        assert result.used == (expected > 0).sum()
        np.testing.assert_allclose(result.row_share, expected.sum(1) / expected.sum())
        np.testing.assert_allclose(result.column_share, expected.sum(0) / expected.sum())
    assert [m.counts.shape for m in maps if isinstance(m, LoadMap)] == [(4, 8), (4, 6)]


@pytest.mark.parametrize("shape", [(4, 4), (3, 8)])
def test_row_and_column_that_are_drawn_apart_share_nothing(shape):
    found = map_load(of(rng().integers(shape[0] * shape[1], size=(3000, 2)), shape), rng())
    assert found.information <= found.null
    # Miller and Madow take the bias, (rows − 1)(columns − 1) / 2N, off: what is left is noise.
    assert abs(found.corrected) < found.information
    assert ("choices compared", "6,000 of 3,000 token ids") in found.numbers().rows


@pytest.mark.parametrize("slots", [1, 4])
def test_few_token_ids_are_not_said_to_tie_row_and_column(slots):
    """Their rows and columns are independent: the claim may be made of 1 in 40, here of 2 in 20."""
    found = [map_load(of_ids(seed, slots, tokens=1000), rng()) for seed in range(20)]
    told = ["no better than by chance" not in each.says for each in found]
    assert all(each.information > 0.05 and each.ids <= 200 for each in found)
    assert sum(told) <= 2


def test_ids_change_places_whole():
    ids = rng().integers(30, size=500)
    source = exchange_ids(ids, rng())
    pairs = {(int(old), int(new)) for old, new in zip(ids, ids[source], strict=True)}
    assert len(pairs) == len({old for old, _ in pairs}) == len({new for _, new in pairs})
    # Of one id's tokens not always the same one comes.
    assert len(np.unique(source)) > 200


def test_a_row_that_decides_the_column_tells_all_of_it():
    diagonal = np.tile(np.arange(4) * 5, 100)[:, None]
    found = map_load(of(diagonal, (4, 4)), rng())
    assert found.information == pytest.approx(math.log(4))
    assert found.most == pytest.approx(math.log(4))
    assert found.null < 0.1


def test_zero_keys_make_the_map_a_set_of_points():
    result = measure(subject(options={"E.key_init": "zeros", "E.n_experts": 24, "E.k": 3}))[1]
    assert isinstance(result, LoadMap)
    assert (result.constant, result.zero_keys) == (True, True)
    others = measure(subject(options={"E.n_experts": 24}))[1]
    assert isinstance(others, LoadMap)
    assert (others.constant, others.zero_keys) == (False, False)


def test_a_dead_expert_is_an_empty_cell_and_no_other():
    experts = rng().integers(31, size=(2000, 4))
    experts[experts >= 13] += 1
    found = map_load(of(experts), rng())
    assert found.used == 31
    cells = cells_of(found.figure())
    assert np.argwhere(np.isnan(cells)).tolist() == [[13 // 8, 13 % 8]]


@pytest.mark.parametrize(("shape", "pool"), [((4, 6), 2), ((5, 7), 3), ((4, 4), 1)])
def test_cells_of_a_large_map_are_means_of_blocks(shape, pool):
    load = rng().random(shape)
    found = key_map.average_blocks(load, pool)
    assert found.shape == (-(-shape[0] // pool), -(-shape[1] // pool))
    for i, j in np.ndindex(found.shape):
        block = load[i * pool : (i + 1) * pool, j * pool : (j + 1) * pool]
        assert found[i, j] == pytest.approx(block.mean())


@pytest.mark.parametrize(("tokens", "n_experts"), [(200, 12), (7, 1000)])  # in a table, sorted
def test_pairs_are_the_loop_over_tokens(tokens, n_experts):
    chosen = rng().integers(n_experts, size=(tokens, 6))
    chosen[0, :] = chosen[0, 0]
    alone, both = Counter(), Counter()
    for row in chosen.tolist():
        distinct = sorted(set(row))
        alone.update(distinct)
        both.update(combinations(distinct, 2))
    found = count_pairs(chosen)
    assert dict(zip(zip(found.first, found.second, strict=True), found.both, strict=True)) == both
    for i, (first, second) in enumerate(zip(found.first, found.second, strict=True)):
        n, n_first, n_second = both[first, second], alone[first], alone[second]
        assert found.expected[i] == pytest.approx(n_first * n_second / tokens)
        assert found.pmi[i] == pytest.approx(math.log(n * tokens / (n_first * n_second)))
        assert found.overlap[i] == pytest.approx(n / (n_first + n_second - n))


def test_few_token_ids_are_not_said_to_bind_experts():
    """Experts of an id are drawn apart: the claim may be made of 1 in 20, here of 2 in 20."""
    told = 0
    for seed in range(20):
        draws = np.random.default_rng(seed)
        experts, ids = draws.integers(144, size=(100, 4)), draws.integers(100, size=1000)
        found = [of(experts[ids], (12, 12), layer, ids) for layer in range(2)]
        told += not measure_co_activation(found, draws).says.startswith(SILENT)
    assert told <= 2


def test_independent_experts_have_no_pmi_beyond_the_shuffles():
    chosen = rng().integers(32, size=(4000, 4))
    found = measure_pairs(of(chosen), rng())
    # Four slots of 32 experts: a slot that one expert has is taken from the others.
    alone, neither = 1 - (31 / 32) ** 4, (30 / 32) ** 4
    both = 2 * alone - 1 + neither
    # Counts of about 45 a pair: their noise adds 1/90 to the mean over co-occurrences.
    assert found.null.mean() == pytest.approx(math.log(both / alone**2), abs=0.03)
    assert found.mean_pmi == pytest.approx(found.null.mean(), abs=0.005)
    assert measure_co_activation([of(chosen)], rng()).says.startswith(SILENT)


def test_a_planted_pair_is_found_and_named():
    chosen = rng().integers(30, size=(4000, 4))
    partners = rng().random(4000) < 0.1
    chosen[partners, 0], chosen[partners, 1] = 30, 31
    found = measure_pairs(of(chosen), rng())
    assert found.top is not None
    assert (found.top.first, found.top.second) == ((3, 6), (3, 7))
    assert found.top.both == partners.sum()
    assert found.coalition.tolist() == [30, 31]
    together = measure_co_activation([of(chosen)], rng())
    assert found.excess > together.chance
    assert f"(3, 6) and (3, 7), {partners.sum()} (" in together.numbers().rows[0][-1]


def test_a_coalition_is_a_connected_set_of_overlapping_experts():
    chosen = random_choices(60, 5, 14)
    chosen[:30, :2] = [20, 21]
    chosen[:25, 2] = 22
    pairs = count_pairs(chosen)
    edges = {
        (int(a), int(b))
        for a, b, overlap in zip(pairs.first, pairs.second, pairs.overlap, strict=True)
        if overlap >= 0.5
    }
    best: set[int] = set()
    for start in {expert for edge in edges for expert in edge}:
        reached, new = {start}, {start}
        while new:
            new = {x for e in edges for x in e if set(e) & new} - reached
            reached |= new
        best = max(best, reached, key=len)
    assert len(best) >= 3
    assert set(find_coalition(pairs).tolist()) == best


def test_shares_of_common_keys_and_heights_count_co_occurrences():
    chosen = random_choices(200, 4, 32)
    pairs = count_pairs(chosen)
    together = [pair for row in chosen.tolist() for pair in combinations(sorted(row), 2)]
    aligned = [a // 8 == b // 8 or a % 8 == b % 8 for a, b in together]
    assert pairs.compute_aligned_share(8) == pytest.approx(np.mean(aligned))
    assert pairs.bin_pmi().sum() == pytest.approx(1)


def test_few_tokens_are_drawn_where_there_are_many():
    found = of(np.arange(100)[:, None] % 32)
    for most, drawn in ((1000, 100), (7, 7), (0, 1)):
        assert [part.shape for part in draw_tokens(found, most, rng())] == [(drawn, 1), (drawn,)]


def test_a_model_without_product_keys_is_turned_away():
    for found in (subject("AM"), subject("AR")):
        with pytest.raises(NotApplicableError, match="experts"):
            measure(found)

"""The atlas's frequencies add up to the scores that the layers compute; planted ones are found."""

import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis.base import NotApplicableError, Subject
from analysis.frequencies import words as frequencies
from analysis.frequencies.atlas import answers, curves, lag_grid, spectrum, use
from analysis.frequencies.bands import (
    FEWEST_PLACEBOS,
    PLACEBOS,
    Band,
    Bands,
    measure_bands,
    remove_pairs,
)
from analysis.frequencies.figures import edges_of
from analysis.frequencies.spectra import (
    Edges,
    Rotation,
    anywhere,
    by_lag,
    causal_means,
    elsewhere,
    linked,
    on_edges,
    rotations,
)
from analysis.record import to_plain
from analysis.scoring import scored
from lab.layers.attention import Attention
from lab.layers.ssd import SSD
from lab.models import build
from tasks.mqar import MQAR

TASK = MQAR(seq_len=16, vocab_size=32).replace(n_pairs=(2, 4))
CASES = {
    "attention": ("AM", {}),
    "shared keys": ("AM", {"A.n_kv_heads": 2}),
    "neighbouring channels": ("AM", {"A.rope_layout": "interleaved", "A.rope_base": 50.0}),
    "SSD": ("SM", {"S.d_state": 8}),
    "SSD in groups": ("SM", {"S.d_state": 8, "S.n_groups": 2}),
    "SSD in tiled groups": (
        "SM",
        {"S.d_state": 8, "S.n_groups": 2, "S.groups": "tiled", "S.rope_layout": "interleaved"},
    ),
    "IFA": ("IM", {}),
}


def subject(stack="AM SM", options=None, rows=3, double=True):
    """Return a subject that is not trained, in fp64: sums then agree to twelve digits."""
    model = build(stack, vocab_size=32, d_model=32, n_heads=4, options=options)
    batch = TASK.batch(split="test", size=rows)
    return Subject(TASK, (model.double() if double else model).eval(), batch)


def planted(product, theta, seq_len=16, rows=4):
    """Return a rotation of one comparison whose keys are ones and whose q̄k is `product` [m]."""
    k = torch.ones(rows, seq_len, 1, len(theta), dtype=torch.complex128)
    q = k * torch.as_tensor(product, dtype=torch.complex128).conj()
    return Rotation(0, "Q/K", q, k, np.asarray(theta), 1.0, np.zeros(1, np.int64), None)


def first_mixer(model) -> Attention | SSD:
    """Return the mixer of the first block."""
    mixer = model.blocks[0].mixer
    assert isinstance(mixer, Attention | SSD)
    return mixer


def traces(figure):
    """Return what a figure draws."""
    assert figure is not None
    return figure.to_dict()["data"]


def direct(found, model, batch):
    """Return score [b h t s] and decay [b t h] from the rotated vectors that the layer computes."""
    mixer = first_mixer(model)
    _, cache = model.run_with_cache(batch.inputs)
    point = "blocks.0.mixer.hook_"
    attention = found.sides == "Q/K"
    q, k = (cache[point + n] for n in (("rot_q", "rot_k") if attention else ("C_rot", "B_rot")))
    b, t = batch.inputs.shape
    score = torch.zeros(b, mixer.n_heads, t, t, dtype=torch.float64)
    for h in range(mixer.n_heads):
        if isinstance(mixer, Attention):
            mine, theirs = h, h // (mixer.n_heads // mixer.n_kv_heads)
        elif mixer.groups == "tiled":
            mine = theirs = h % mixer.n_groups
        else:
            mine = theirs = h // (mixer.n_heads // mixer.n_groups)
        for i in range(t):
            for j in range(t):
                score[:, h, i, j] = (q[:, i, mine] * k[:, j, theirs]).sum(-1)
    scale = q.shape[-1] ** -0.5 if attention else 1.0
    log_decay = None if attention else cache[point + "log_decay"]
    return score * scale, log_decay


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_frequencies_add_up_to_the_score_of_rotated_vectors(case):
    stack, options = CASES[case]
    given = subject(stack, options)
    [(found, parts, decays, decayed)] = rotations(
        given.model, given.batch, lambda r: (r, *by_lag(r, np.array([0, 1, 5, 15])))
    )
    score, log_decay = direct(found, given.model, given.batch)
    for i, lag in enumerate([0, 1, 5, 15]):
        for h, c in enumerate(found.groups):
            raw, faded, kept = [], [], []
            for b in range(3):
                for t in range(lag, 16):
                    decay = 1.0
                    for k in range(t - lag + 1, t + 1):
                        decay *= 1.0 if log_decay is None else math.exp(log_decay[b, k, h].item())
                    raw.append(score[b, h, t, t - lag].item())
                    kept.append(decay)
                    faded.append(raw[-1] * decay)
            # fp64, but for the layer's table of angles, which is exact to its rounding.
            assert parts[i, c].sum() == pytest.approx(np.mean(raw), abs=1e-10)
            assert decays[i, h] == pytest.approx(np.mean(kept), abs=1e-10)
            assert decayed[i, h] == pytest.approx(np.mean(faded), abs=1e-10)


@pytest.mark.parametrize("case", ["shared keys", "SSD in tiled groups"])
@torch.no_grad()
def test_edges_have_the_scores_of_the_layer(case):
    stack, options = CASES[case]
    given = subject(stack, options)
    edges = linked(given.batch, "query_pos", "value_pos")
    assert (edges.targets > edges.sources).all()
    [(found, products)] = rotations(given.model, given.batch, lambda r: (r, on_edges(r, edges)))
    score, _ = direct(found, given.model, given.batch)
    added = (products * found.turn(edges.lags)[:, None]).real
    for e, (b, t, s) in enumerate(zip(edges.rows, edges.targets, edges.sources, strict=True)):
        for h, c in enumerate(found.groups):
            assert added[e, c].sum().item() == pytest.approx(score[b, h, t, s].item(), abs=1e-10)


@torch.no_grad()
def test_causal_means_are_loops_over_pairs():
    given = subject("AM")
    [found] = rotations(given.model, given.batch, lambda r: r)
    size, product = causal_means(found)
    sizes, products = [], []
    for b in range(3):
        for t in range(16):
            for s in range(t + 1):
                z = found.q[b, t].conj() * found.k[b, s]
                sizes.append(z.abs().numpy())
                products.append(z.numpy())
    np.testing.assert_allclose(size, np.mean(sizes, 0))
    np.testing.assert_allclose(product, np.mean(products, 0), atol=1e-12)
    result = spectrum(found)
    np.testing.assert_allclose(result.share, size / size.sum(-1, keepdims=True))
    np.testing.assert_allclose(result.share.sum(-1), 1)
    for c in range(4):
        entropy = -sum(p * math.log(p) for p in result.share[c])
        assert result.effective[c] == pytest.approx(math.exp(entropy))
        long = sum(result.share[c, m] for m in range(4) if 2 * math.pi / found.theta[m] > 16)
        assert result.long[c] == pytest.approx(long)


def test_blocks_of_rows_change_nothing(monkeypatch):
    given = subject("SM", {"S.d_state": 8})
    lags = np.array([1, 4])
    [whole] = rotations(given.model, given.batch, lambda r: (*causal_means(r), *by_lag(r, lags)))
    monkeypatch.setattr("analysis.frequencies.spectra.BLOCK_ENTRIES", 1)
    [parts] = rotations(given.model, given.batch, lambda r: (*causal_means(r), *by_lag(r, lags)))
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


def test_a_placebo_has_the_lags_and_rows_of_its_edges():
    batch = TASK.batch(split="test", size=64)
    edges = linked(batch, "value_pos", "key_pos")
    placebo = elsewhere(edges, 16, np.random.default_rng(0))
    assert torch.equal(placebo.lags, edges.lags)
    assert torch.equal(placebo.rows, edges.rows)
    assert placebo.sources.min() == 0
    assert placebo.targets.max() == 15


def test_causal_edges_are_all_as_likely():
    batch = TASK.batch(split="test", size=2)
    count = 200_000
    edges = anywhere(batch, count, np.random.default_rng(0))
    seen = np.zeros((2, 16, 16))
    np.add.at(seen, tuple(part.numpy() for part in vars(edges).values()), 1)
    lower = np.tri(16, dtype=bool)
    assert (seen[:, ~lower] == 0).all()
    expected = count / (2 * lower.sum())
    # A count's standard deviation is near √735 = 27; six of them among 272.
    assert np.abs(seen[:, lower] - expected).max() < 6 * math.sqrt(expected)


def test_one_planted_frequency_has_all_the_energy():
    theta = 100.0 ** -(np.arange(8) / 8)
    result = spectrum(planted(np.eye(8)[6], theta))
    assert result.effective[0] == pytest.approx(1)
    assert result.share[0, 6] == pytest.approx(1)
    assert (2 * math.pi / theta > 16).tolist() == [False] * 2 + [True] * 6
    assert result.long[0] == pytest.approx(1)
    assert result.uniform_long == 6 / 8
    assert result.coherence[0, 6] == pytest.approx(1)


def test_equal_energies_are_as_long_as_uniform():
    theta = 100.0 ** -(np.arange(8) / 8)
    result = spectrum(planted(np.exp(1j * np.arange(8)), theta))
    assert result.effective[0] == pytest.approx(8)
    assert result.long[0] == pytest.approx(result.uniform_long)


@pytest.mark.parametrize("lag", [1, 3])
def test_a_planted_lag_is_where_the_score_peaks(lag):
    theta = 100.0 ** -(np.arange(8) / 8)
    rotation = planted(np.exp(1j * lag * theta), theta, rows=20)
    batch = TASK.batch(split="test", size=20)
    rng = np.random.default_rng(0)
    result = curves(rotation, answers(batch, rng), batch, rng)
    assert result.lags[result.score[:, 0].argmax()] == lag
    expected = [sum(math.cos((other - lag) * angle) for angle in theta) for other in result.lags]
    np.testing.assert_allclose(result.score[:, 0], expected)
    # Whatever is carried to a lag has the score of all that stand at it: the content is constant.
    np.testing.assert_allclose(result.carried["value → key"], result.score)
    says = frequencies.describe(frequencies.Lags((result,), 16)).says
    assert f"at lag {lag}" in says
    assert result.pairs.tolist() == [20 * (16 - other) for other in result.lags]
    few = frequencies.Lags((replace(result, pairs=result.pairs // 20),), 16)
    assert frequencies.describe(few).says == "No layer's mean score prefers a lag."


def test_only_the_planted_frequency_carries_the_answers():
    theta = 100.0 ** -(np.arange(8) / 8)
    batch = TASK.batch(split="test", size=40)
    rotation = planted(np.zeros(8), theta, rows=40)
    noise = np.random.default_rng(0).normal(size=rotation.q.shape)
    rotation.q[:] = torch.from_numpy(0.1 * noise)
    edges = linked(batch, "query_pos", "value_pos")
    rotation.q[edges.rows, edges.targets, 0, 6] += 5
    rotation.k[:, :, 0, 6] = 0.1
    rotation.k[edges.rows, edges.sources, 0, 6] = 1
    result = use(rotation, "query → value", edges, np.random.default_rng(1))
    assert result.by_pair[0].argmax() == 6
    assert result.by_pair[0, 6] / result.advantage[0] == pytest.approx(1, abs=0.1)
    assert result.long[0] == pytest.approx(1, abs=0.1)
    assert 0 < result.interval[0] < result.advantage[0] < result.interval[1]
    says = frequencies.describe(frequencies.Uses((result,), 16)).says
    assert says.startswith("Query → value: most in layer 0 (Q/K), +")


def test_an_advantage_is_the_difference_of_two_loops():
    given = subject("AM")
    edges = linked(given.batch, "query_pos", "value_pos")
    [(found, result)] = rotations(
        given.model,
        given.batch,
        lambda r: (r, use(r, "query → value", edges, np.random.default_rng(3))),
    )
    score, _ = direct(found, given.model, given.batch)
    placebo = elsewhere(edges, 16, np.random.default_rng(3))

    def of(edges: Edges, head: int) -> list[float]:
        places = zip(edges.rows, edges.targets, edges.sources, strict=True)
        return [score[b, head, t, s].item() for b, t, s in places]

    for head in range(4):
        expected = np.mean(of(edges, head)) - np.mean(of(placebo, head))
        assert result.advantage[head] == pytest.approx(expected, abs=1e-10)
        assert result.effect[head] == pytest.approx(expected / np.std(of(placebo, head)))
    assert result.by_pair.sum(-1) == pytest.approx(result.advantage)


@pytest.mark.parametrize("seq_len", [2, 16, 2048])
def test_lags_are_within_the_row(seq_len):
    lags = lag_grid(seq_len)
    assert lags[0] == 1
    assert lags[-1] == seq_len - 1
    assert (np.diff(lags) > 0).all()


@pytest.mark.parametrize("case", ["shared keys", "neighbouring channels", "SSD in tiled groups"])
@torch.no_grad()
def test_a_band_taken_out_is_a_model_without_its_weights(case):
    stack, options = CASES[case]
    given = subject(stack, options, rows=8)
    mixer = first_mixer(given.model)
    rotary = mixer.rotary_pairs
    assert rotary is not None
    other = copy.deepcopy(given.model)
    same = first_mixer(other)
    projection = same.q if isinstance(same, Attention) else same.C_proj
    weight = projection.weight.unflatten(0, (-1, 8))
    for m in (1, 2):
        interleaved = mixer.rope_layout == "interleaved"
        for channel in (2 * m, 2 * m + 1) if interleaved else (m, m + 4):
            weight[:, channel] = 0
    with given.model.hooks([remove_pairs(rotary, 0, np.array([1, 2]))]):
        hidden = given.model(given.batch.inputs)
    torch.testing.assert_close(hidden, other(given.batch.inputs))
    assert not torch.allclose(hidden, given.model(given.batch.inputs))


def test_changes_of_accuracy_are_differences_of_two_models():
    given = subject("AM", rows=8)
    result = measure_bands(given)
    whole = scored(given.model, given.batch).accuracy
    assert result.accuracy == whole
    assert [band.name for band in result.bands] == ["fast", "middle", "slow"]
    assert [band.pairs for band in result.bands] == [(0, 1), (2, 2), (3, 3)]
    rotary = first_mixer(given.model).rotary_pairs
    assert rotary is not None
    for band in result.bands:
        pairs = np.arange(band.pairs[0], band.pairs[1] + 1)
        with given.model.hooks([remove_pairs(rotary, 0, pairs)]):
            change = scored(given.model, given.batch).accuracy - whole
        assert band.change == pytest.approx(change)
        assert FEWEST_PLACEBOS <= len(band.placebo) <= PLACEBOS


def band(change, interval, placebo, name="fast"):
    return Band(1, "C/B", name, (0, 2), (6.0, 40.0), change, interval, np.array(placebo))


@pytest.mark.parametrize(
    ("change", "interval", "matters"),
    [(-0.3, (-0.4, -0.2), True), (-0.05, (-0.1, -0.01), False), (-0.3, (-0.7, 0.1), False)],
)
def test_a_band_matters_beyond_random_ones_only(change, interval, matters):
    result = Bands((band(change, interval, [-0.1, 0.0]),), 0.9, (0.88, 0.92), 0.06, 50)
    assert result.bands[0].matters is matters
    says = frequencies.describe(result).says
    assert ("without the fast third of C/B in layer 1 -30.0" in says) is matters
    assert ("No third costs more" in says) is not matters


def test_a_band_like_random_ones_is_named_once_in_twenty(monkeypatch):
    """Bands are random sets themselves here: what each set costs is drawn, the rows agree on it."""
    given = subject("AM", rows=8, double=False)
    rng, named, bands = np.random.default_rng(0), 0, 0
    monkeypatch.setattr("analysis.frequencies.bands._by_rows", lambda *given: (-1.0, -0.1))

    class Lost:
        rows = torch.arange(8)
        accuracy = 1.0

        def __init__(self, share):
            self.right = torch.ones(8) if share is None else torch.full((8,), 1 - share)

    for _ in range(300):
        first = iter([None])
        monkeypatch.setattr(
            "analysis.frequencies.bands.scored",
            lambda model, batch, first=first: Lost(next(first, rng.random())),
        )
        result = measure_bands(given)
        named += sum(found.matters for found in result.bands)
        bands += len(result.bands)
    # 900 bands at one in twenty: a standard error of 0.7 points, more as three share placebos.
    assert 0.02 < named / bands < 0.08


def test_what_frequencies_add_by_lag_sums_to_the_rise_of_the_telling_head():
    given = subject("AM", rows=40)
    [found] = rotations(
        given.model,
        given.batch,
        lambda r: curves(r, {}, given.batch, np.random.default_rng(0)),
    )
    ranges = [
        max(column[found.pairs >= 100]) - min(column[found.pairs >= 100]) for column in found.rise.T
    ]
    assert found.telling == ranges.index(max(ranges))
    # Kept in fp32.
    np.testing.assert_allclose(found.by_pair.sum(1), found.rise[:, found.telling], atol=1e-5)


def test_a_peak_names_the_fewest_frequencies_behind_it():
    theta = 100.0 ** -(np.arange(8) / 8)
    weight = np.array([0, 0, 3.0, 2, 0.5, 0, 0, 0])
    batch = TASK.batch(split="test", size=20)
    rotation = planted(weight * np.exp(1j * theta), theta, rows=20)
    found = curves(rotation, {}, batch, np.random.default_rng(0))
    peak = frequencies.peak_of(found)
    assert peak is not None
    assert peak.lag == 1
    added = sorted(found.by_pair[0], reverse=True)
    count = next(n for n in range(1, 9) if sum(added[:n]) >= found.rise[0, 0] / 2)
    assert peak.count == count <= 2
    waves = 2 * math.pi / theta
    assert waves[2] <= peak.wavelengths[0] <= peak.wavelengths[1] <= waves[3]
    says = frequencies.describe(frequencies.PairsByLag((found,), (peak,))).says
    assert f"half of it from {count} of 8 frequencies" in says
    few = replace(found, pairs=found.pairs // 20)
    assert frequencies.peak_of(few) is None
    untold = frequencies.PairsByLag((few,), ())
    assert frequencies.describe(untold).says.startswith("No layer's mean score prefers a lag")
    assert frequencies.draw(untold) is None


def test_at_chance_nothing_can_be_lost():
    result = Bands((band(-0.3, (-0.4, -0.2), [0.0]),), 0.06, (0.04, 0.08), 0.06, 50)
    assert "nothing can be lost" in frequencies.describe(result).says


def test_a_model_of_both_kinds_is_measured_described_and_drawn():
    given = subject("SM AM", {"S.d_state": 8}, rows=10, double=False)
    results = frequencies.measure(given)
    energies, uses, lags, by_pair, taken = results
    assert isinstance(energies, frequencies.Energies)
    assert isinstance(uses, frequencies.Uses)
    assert isinstance(lags, frequencies.Lags)
    assert isinstance(by_pair, frequencies.PairsByLag)
    assert isinstance(taken, Bands)
    assert len(traces(frequencies.draw(by_pair))) == 2
    assert [(s.layer, s.sides) for s in energies.layers] == [(0, "C/B"), (1, "Q/K")]
    assert [(u.edge, u.layer) for u in uses.layers] == [
        ("query → value", 0),
        ("query → value", 1),
        ("value → key", 0),
        ("value → key", 1),
    ]
    json.dumps(to_plain(results))
    for result in results:
        words = frequencies.describe(result)
        assert words.title
        assert words.says.endswith(".")
        assert words.says in words.alt
    maps = [trace["z"]["shape"] for trace in traces(frequencies.draw(energies))]
    assert maps == ["1, 4", "4, 4"]
    # Panels have all pairs and two kinds of edges; those of C/B each with and without decay.
    assert len(traces(frequencies.draw(lags))) == 6 + 3
    assert len(traces(frequencies.draw(taken))[1]["y"]) == 6


def test_an_untrained_spectrum_does_not_lean():
    says = frequencies.describe(frequencies.measure(subject("AM"))[0]).says
    assert says.startswith("No layer leans to long or to short wavelengths.")


def test_without_pairs_no_use_is_measured():
    given = subject("AM")
    batch = type(given.batch)(given.batch.inputs, given.batch.targets, given.batch.roles, {})
    results = frequencies.measure(Subject(TASK, given.model, batch))
    assert [type(r).__name__ for r in results] == ["Energies", "Lags", "PairsByLag", "Bands"]
    assert isinstance(results[1], frequencies.Lags)
    assert results[1].layers[0].carried == {}


@pytest.mark.parametrize(
    ("stack", "options"),
    [("NM", {}), ("AM", {"A.position": "none"}), ("SM", {"S.position": "conv"})],
)
def test_where_nothing_rotates_nothing_is_measured(stack, options):
    with pytest.raises(NotApplicableError, match="rotary"):
        frequencies.measure(subject(stack, options))


def test_cells_end_midway_between_wavelengths():
    ends = edges_of(np.array([10.0, 1000.0]))
    np.testing.assert_allclose(ends, [1, 100, 10_000])
    assert edges_of(np.array([10.0])).tolist() == pytest.approx(
        [10 / math.e**0.5, 10 * math.e**0.5]
    )

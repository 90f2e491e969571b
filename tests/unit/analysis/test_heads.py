"""A planted head has the score it was planted with; sums are the loops; nothing is invented."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from analysis.base import NotApplicableError, Subject
from analysis.matrices import heads, moves, rollout
from analysis.matrices.head_reach import HeadReach
from analysis.matrices.head_scores import HeadScores
from analysis.matrices.moves import Moves
from analysis.matrices.patterns import PATTERNS, compute_uniform_shares
from analysis.matrices.row_sums import RowSums, sum_row
from analysis.mixing import Mixer, collect_mixers
from analysis.plots.heads import LINES, choose_log_ticks
from analysis.record import to_plain
from lab.files import RunError
from lab.hooks import run_with_cache
from lab.layers.attention import Attention
from lab.layers.inner_function import InnerFunctionAttention
from lab.layers.ssd import SSD
from lab.models import LanguageModel, build
from tasks.base import Batch
from tasks.mqar import MQAR

TASK = MQAR(seq_len=16, vocab_size=32)
TOKENS = torch.tensor([3, 5, 3, 7, 5, 5, 3, 9, 7, 1])
"""Repeats, one at once (5 5), and a token that never returns."""


class Shown(nn.Module):
    """A mixer whose matrix is given."""

    def __init__(self, d_model: int):
        super().__init__()
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.given = torch.ones(2, 16, 16).tril()

    def matrix(self, x: Tensor) -> Tensor:
        return self.given.expand(len(x), *self.given.shape)

    def values(self, x: Tensor) -> Tensor:
        return torch.stack(x.chunk(self.given.shape[0], dim=-1), dim=1)

    def project(self, x: Tensor, z: Tensor) -> Tensor:
        return self.out(torch.cat(z.unbind(1), dim=-1))

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x, self.matrix(x)[:, :, : x.shape[1], : x.shape[1]] @ self.values(x))


class Squashed(Shown):
    """Its project is not linear."""

    def project(self, x: Tensor, z: Tensor) -> Tensor:
        return super().project(x, z).tanh()


class Gated(Shown):
    """Its project is linear, but not the same at every position."""

    def project(self, x: Tensor, z: Tensor) -> Tensor:
        return super().project(x, z) * x


class Raising(Shown):
    """Its project raises."""

    def project(self, x: Tensor, z: Tensor) -> Tensor:
        raise KeyError("mine")


class Opaque(nn.Module):
    """A mixer that offers no matrix."""

    def __init__(self, d_model: int):
        super().__init__()
        self.line = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x)


def planted(matrix: Tensor, kind: type[Shown] = Shown, rows: int = 1) -> Mixer:
    torch.manual_seed(0)
    module = kind(4 * len(matrix))
    module.given = matrix
    with torch.no_grad():
        return Mixer(0, module, torch.randn(rows, matrix.shape[1], 4 * len(matrix)))


def look(matrix: Tensor, tokens: Tensor = TOKENS) -> RowSums:
    with torch.no_grad():
        return sum_row(planted(matrix), 0, tokens, np.random.default_rng(0))


def random_matrix(n_heads: int = 2, seq_len: int = 10) -> Tensor:
    """Signed, and unlike from head to head."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n_heads, seq_len, seq_len, generator=generator).tril()


def where(kind: str, tokens: list[int]) -> list[list[float]]:
    """Return the 0/1 matrix P, by TransformerLens's definitions in words."""
    size = len(tokens)
    found = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            if kind == "previous token":
                found[i][j] = float(j == i - 1)
            elif kind == "duplicate token":
                found[i][j] = float(j < i and tokens[j] == tokens[i])
            elif kind == "induction":
                found[i][j] = float(j >= 1 and j - 1 < i and tokens[j - 1] == tokens[i])
            else:
                found[i][j] = float(j == 0 and i > 0)
    return found


def detected(matrix: Tensor, kind: str, tokens: list[int]) -> tuple[float, float]:
    """Return Σ A·P / Σ A, the detector's "mul", and the same over rows in which P has any."""
    pattern, hit, mass, able = where(kind, tokens), 0.0, 0.0, 0.0
    for i in range(len(tokens)):
        row = [abs(a) for a in matrix[i].tolist()]
        hit += sum(a * p for a, p in zip(row, pattern[i], strict=True))
        mass += sum(row)
        able += sum(row) if any(pattern[i]) else 0.0
    return hit / mass, hit / able


@pytest.mark.parametrize("block", [2**22, 30])
def test_scores_are_transformer_lenses_by_loops(block, monkeypatch):
    """`head_detector.compute_head_attention_similarity_score(error_measure="mul")`, restated."""
    monkeypatch.setattr("analysis.mixing.BLOCK_ENTRIES", block)
    matrix = random_matrix()
    found = look(matrix)
    for h in range(2):
        for p, kind in enumerate(PATTERNS):
            score, share = detected(matrix[h], kind, TOKENS.tolist())
            on = float(found.on_patterns[h, p])
            assert on / float(found.mass[h]) == pytest.approx(score, rel=1e-5)
            assert on / float(found.with_patterns[h, p]) == pytest.approx(share, rel=1e-5)


@pytest.mark.parametrize("kind", PATTERNS)
def test_a_planted_head_has_a_share_of_one(kind):
    pattern = torch.tensor(where(kind, TOKENS.tolist()))
    # Rows without such a position look at themselves, and say nothing of the head.
    matrix = torch.where(pattern.sum(-1, keepdim=True) > 0, pattern, torch.eye(10))
    found = look(-matrix[None])
    share = found.on_patterns / found.with_patterns
    assert share[0, PATTERNS.index(kind)] == pytest.approx(1.0)


def test_chance_is_the_loop_over_a_uniform_matrix():
    uniform = torch.ones(10, 10).tril() / torch.arange(1, 11)[:, None]
    score, share = compute_uniform_shares(TOKENS)
    for p, kind in enumerate(PATTERNS):
        expected = detected(uniform, kind, TOKENS.tolist())
        # Σ over rows of the share, not of mass, for a matrix whose rows all have a mass of 1.
        assert (float(score[p]), float(share[p])) == pytest.approx(expected, rel=1e-5)


def test_without_repeats_there_is_no_chance_of_a_duplicate():
    share = compute_uniform_shares(torch.arange(6))[1]
    assert share.isnan().tolist() == [False, True, True, False]


def test_entropy_is_torchs_and_a_uniform_row_has_as_many_keys_as_it_sees():
    matrix = random_matrix()
    found = look(matrix)
    expected = Categorical(probs=matrix.abs()).entropy()
    torch.testing.assert_close(found.entropy, expected.mean(-1))
    torch.testing.assert_close(found.effective_keys, expected.exp().mean(-1))
    uniform = look(torch.ones(1, 10, 10).tril() * 0.3)
    assert float(uniform.effective_keys) == pytest.approx(np.arange(1, 11).mean(), rel=1e-5)


def test_a_row_without_mass_counts_for_nothing():
    matrix = torch.ones(1, 10, 10).tril()
    matrix[0, 5:] = 0
    found = look(matrix)
    assert float(found.effective_keys) == pytest.approx(3.0, rel=1e-5)
    assert float(found.entropy) == pytest.approx(math.log(120) / 5, rel=1e-5)


def test_distance_is_the_loop():
    matrix = random_matrix()
    far = [
        sum(abs(matrix[h, i, j]) * (i - j) for i in range(10) for j in range(10)) for h in (0, 1)
    ]
    expected = torch.tensor(far) / matrix.abs().sum((1, 2))
    torch.testing.assert_close(look(matrix).distance, expected)
    assert look(torch.eye(10).roll(1, 0).tril()[None]).distance == 1


def test_neither_sign_nor_scale_nor_the_name_of_a_token_matters():
    matrix, signs = random_matrix(), torch.randn(10, 10).sign()
    renamed = torch.randperm(32)[TOKENS]
    found, other = look(matrix), look(-3 * matrix * signs, renamed)
    for name in ("entropy", "effective_keys", "distance"):
        torch.testing.assert_close(getattr(found, name), getattr(other, name))
    torch.testing.assert_close(other.on_patterns, 3 * found.on_patterns)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Attention, {"n_kv_heads": 1}),
        (InnerFunctionAttention, {"n_values": 3}),
        (SSD, {"n_groups": 2, "d_state": 4}),
        (SSD, {"d_state": 4, "position": "conv", "d_inner": 24}),
        (SSD, {"d_state": 4, "gate": "silu", "d_inner": 8}),
        (SSD, {"d_state": 4, "gate": "norm", "n_groups": 2}),
    ],
    ids=str,
)
@torch.no_grad()
def test_an_entry_weighs_what_it_moves(kind: type[Attention] | type[SSD], options: dict[str, Any]):
    """The parts M_ij W_O (g_i ⊙ v_j), written out one by one, add up to the layer's output."""
    torch.manual_seed(0)
    module, x = kind(16, 2, **options), torch.randn(1, 7, 16)
    entries = Moves.of(Mixer(0, module, x), 0, np.random.default_rng(0))
    chosen, norms = entries.norms(torch.arange(7))
    assert chosen.tolist() == list(range(7))
    matrix, values = module.matrix(x)[0], module.values(x)[0]
    norms_by_hand, total = torch.zeros(2, 7, 7), torch.zeros(7, 16)
    weight = module.out.weight if isinstance(module, Attention) else module.out_proj.weight
    for h in range(2):
        width = values.shape[-1]
        some = slice(h * width, (h + 1) * width)
        for i in range(7):
            gate = gate_at(module, x, i)[some]
            for j in range(i + 1):
                part = weight[:, some] @ (gate * values[h, j])
                norms_by_hand[h, i, j] = part.norm()
                total[i] += matrix[h, i, j] * part
    torch.testing.assert_close(total, module(x)[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norms.tril(), norms_by_hand, rtol=1e-4, atol=1e-5)


def gate_at(module: nn.Module, x: Tensor, i: int) -> Tensor:
    """Return what multiplies the mixed values at a position, the norm's scale included."""
    if not isinstance(module, SSD) or module.z_proj is None:
        return torch.ones(64)
    gate = nn.functional.silu(module.z_proj(x[0, i]))
    if module.norm_weight is None:
        return gate
    mixed = run_with_cache(module, x, "hook_ssm_out")[1]["hook_ssm_out"][0, i].flatten() * gate
    halves = [half.square().mean().add(1e-5).rsqrt().expand(len(half)) for half in mixed.chunk(2)]
    return gate * torch.cat(halves) * module.norm_weight


def test_weights_are_those_of_the_rows_they_stand_in(monkeypatch):
    """Some rows of a gated layer's matrix, met by blocks, as all at once."""
    torch.manual_seed(0)
    mixer = Mixer(0, SSD(16, 2, d_state=4, gate="silu"), torch.randn(1, 10, 16))
    with torch.no_grad():
        whole = sum_row(mixer, 0, TOKENS, np.random.default_rng(0))
        monkeypatch.setattr("analysis.mixing.BLOCK_ENTRIES", 60)
        monkeypatch.setattr(moves, "BLOCK_ENTRIES", 60)
        blocks = sum_row(mixer, 0, TOKENS, np.random.default_rng(0))
        monkeypatch.setattr(moves, "GATED_TARGETS", 4)
        some = sum_row(mixer, 0, TOKENS, np.random.default_rng(0))
        rows = np.sort(np.random.default_rng(0).choice(10, size=4, replace=False))
        norms = Moves.of(mixer, 0, np.random.default_rng(0)).norms(torch.arange(10))[1]
    torch.testing.assert_close(blocks.moved_on_patterns, whole.moved_on_patterns)
    size = mixer.matrix(0).detach().abs()[:, rows] * norms
    previous = sum(size[:, n, i - 1] for n, i in enumerate(rows.tolist()) if i)
    assert isinstance(previous, Tensor)
    torch.testing.assert_close(some.moved_on_patterns[:, 0], previous)


@pytest.mark.parametrize("kind", [Squashed, Gated])
def test_a_project_that_is_not_linear_has_no_norms(kind):
    with torch.no_grad():
        found = sum_row(planted(random_matrix(), kind), 0, TOKENS, np.random.default_rng(0))
    assert found.moved_on_patterns.isnan().all()
    assert not found.on_patterns.isnan().any()


def test_a_project_that_raises_is_named():
    with pytest.raises(RunError, match=r"Raising.project raised KeyError: 'mine'"):
        Moves.of(planted(random_matrix(), Raising), 0, np.random.default_rng(0))


def subject(
    stack: str = "AM*2", rows: int = 4, model: LanguageModel | None = None, **options: Any
) -> Subject:
    if model is None:
        model = build(stack, vocab_size=32, d_model=16, n_heads=2, options=options)
    return Subject(TASK, model.eval(), TASK.batch(split="test", size=rows))


def with_mixer(monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], stack: str) -> LanguageModel:
    monkeypatch.setattr("lab.models.architectures.load_class", lambda path: kind)
    return build(stack, vocab_size=32, d_model=16, model="tests:Mixer")


def twice(found: Subject) -> Subject:
    """Return a subject whose row comes twice: what is planted for it is then sure."""
    batch = found.batch
    twofold = Batch(
        batch.inputs.repeat(2, 1),
        batch.targets.repeat(2, 1),
        batch.roles.repeat(2, 1),
        {name: link.repeat(2, 1) for name, link in batch.links.items()},
    )
    return replace(found, batch=twofold)


def plant(model: LanguageModel, layer: int, batch: Batch, kinds: tuple[str, str]) -> None:
    """Give a layer one head of each kind; where a kind has no position, the head is uniform."""
    module = model.get_submodule(f"blocks.{layer}.mixer")
    assert isinstance(module, Shown)
    uniform = torch.ones(16, 16).tril() / torch.arange(1, 17)[:, None]
    given = []
    for kind in kinds:
        pattern = torch.tensor(where(kind, batch.inputs[0].tolist()))
        share = pattern / pattern.sum(-1, keepdim=True).clamp(min=1)
        given.append(torch.where(pattern.sum(-1, keepdim=True) > 0, share, uniform))
    module.given = torch.stack(given)


def test_planted_heads_are_named_and_uniform_ones_are_not(monkeypatch):
    model = with_mixer(monkeypatch, Shown, "UM*2")
    plain_one = twice(subject(rows=1, model=model))
    for layer in (0, 1):
        kinds = (("previous token", "first token"), ("induction", "duplicate token"))[layer]
        plant(model, layer, plain_one.batch, kinds)
    scores, _ = heads.measure(plain_one)
    assert isinstance(scores, HeadScores)
    shown = scores.find_patterns()
    named = {(int(scores.layers[h]), int(scores.heads[h]), PATTERNS[p]) for h, p in shown}
    planted_ones = {
        (0, 0, "previous token"),
        (0, 1, "first token"),
        (1, 0, "induction"),
        (1, 1, "duplicate token"),
    }
    assert named == planted_ones
    np.testing.assert_allclose([scores.shares[h, p] for h, p in shown], 1.0, rtol=1e-5)
    for layer in (0, 1):
        module = model.get_submodule(f"blocks.{layer}.mixer")
        assert isinstance(module, Shown)
        module.given = torch.ones(2, 16, 16).tril() / torch.arange(1, 17)[:, None]
    scores, reach = heads.measure(plain_one)
    assert isinstance(scores, HeadScores)
    assert isinstance(reach, HeadReach)
    np.testing.assert_allclose(scores.shares, np.tile(scores.chance, (4, 1)), rtol=1e-5)
    np.testing.assert_allclose(reach.effective_keys, reach.uniform_keys, rtol=1e-5)
    np.testing.assert_allclose(reach.entropy, reach.uniform_entropy, rtol=1e-5)
    np.testing.assert_allclose(reach.distance, reach.uniform_distance, rtol=1e-5)
    assert heads.describe(scores).says.startswith("No head surely shows one of these patterns")


@pytest.mark.parametrize("stack", ["AM IM", "SM SM"])
def test_a_random_model_shows_no_pattern(stack):
    scores, _ = heads.measure(subject(stack, rows=16))
    assert isinstance(scores, HeadScores)
    assert scores.rows == 16
    assert (scores.half_widths > 0).all()
    # A fresh SSD layer decays: what is near is all it sees, the token before included.
    assert {PATTERNS[p] for _, p in scores.find_patterns()} <= {"previous token"}


def test_intervals_are_of_the_mean_over_rows():
    found = subject(rows=16)
    scores, _ = heads.measure(found)
    assert isinstance(scores, HeadScores)
    [first, _] = collect_mixers(found.model, found.batch)
    with torch.no_grad():
        rows = [
            sum_row(first, r, found.batch.inputs[r], np.random.default_rng(0)) for r in range(16)
        ]
    shares = torch.stack([row.on_patterns / row.with_patterns for row in rows])[:, 0, 0].numpy()
    assert scores.shares[0, 0] == pytest.approx(shares.mean(), rel=1e-5)
    half = 1.96 * shares.std(ddof=1) / 4
    assert scores.half_widths[0, 0] == pytest.approx(half, rel=1e-3)


def test_many_heads_share_lines_and_every_head_is_drawn():
    model = build("AM*7", vocab_size=32, d_model=16, n_heads=4)
    for result in heads.measure(subject(model=model)):
        fig = heads.draw(result)
        assert fig is not None
        traces = fig.to_dict()["data"]
        dots = [trace["text"] for trace in traces if trace["mode"] == "markers"]
        assert len(dots) >= 2
        assert all(len(names) == 28 > LINES for names in dots)
        assert list(fig.layout["yaxis"]["ticktext"]) == [str(layer) for layer in range(7)]
        assert "Heads of a layer share a line" in heads.describe(result).reading
        assert to_plain(result)["layers"] == [layer for layer in range(7) for _ in range(4)]


@pytest.mark.parametrize("stack", ["NM", "UM"])
def test_without_a_matrix_nothing_applies(stack, monkeypatch):
    model = with_mixer(monkeypatch, Opaque, f"UM {stack}" if stack == "NM" else stack)
    found = subject(model=model)
    with pytest.raises(NotApplicableError, match="no block has a mixer that offers a matrix"):
        heads.measure(found)
    with pytest.raises(NotApplicableError, match="layer 0, Opaque, offers no matrix"):
        rollout.measure(found)
    none = build("NM", vocab_size=32, d_model=16)
    with pytest.raises(NotApplicableError, match="no block has a sequence mixer"):
        rollout.measure(subject(model=none))


@pytest.mark.parametrize("block", [2**22, 40])
@torch.no_grad()
def test_rollout_is_the_product_and_its_rows_sum_to_one(block, monkeypatch):
    monkeypatch.setattr("analysis.mixing.BLOCK_ENTRIES", block)
    found = subject("AM NM SM IM", rows=2)
    layers = collect_mixers(found.model, found.batch)
    expected = torch.eye(16)
    for mixer in layers:
        size = mixer.matrix(1).abs()
        mean = [[sum(size[h, i, j] for h in (0, 1)) / 2 for j in range(16)] for i in range(16)]
        share = torch.tensor([[entry / sum(row) for entry in row] for row in mean])
        expected = (0.5 * torch.eye(16) + 0.5 * share) @ expected
    rolled = rollout.multiply_layers(layers, 1)
    torch.testing.assert_close(rolled, expected)
    torch.testing.assert_close(rolled.sum(-1), torch.ones(16))
    assert not rolled.triu(1).any()


def test_rollout_finds_a_planted_induction_circuit(monkeypatch):
    """Keys are written to values, queries look at what followed: ¼ of a query is its value."""
    model = with_mixer(monkeypatch, Shown, "UM*2")
    found = twice(subject(rows=1, model=model))
    plant(model, 0, found.batch, ("previous token", "previous token"))
    plant(model, 1, found.batch, ("induction", "induction"))
    [result] = rollout.measure(found)
    assert 0.1 < result.on_value.mean() <= 0.25 + 1e-6
    assert "queries reach the value they ask for" in rollout.describe(result).says
    for layer in (0, 1):
        module = model.get_submodule(f"blocks.{layer}.mixer")
        assert isinstance(module, Shown)
        module.given = torch.ones(2, 16, 16).tril()
    [result] = rollout.measure(found)
    assert result.on_value.mean() == pytest.approx(result.uniform_value, rel=1e-5)
    assert result.on_self.mean() == pytest.approx(result.uniform_self, rel=1e-5)
    assert rollout.describe(result).says.startswith("No recall shows")
    assert "shown" not in to_plain(result)
    figure = rollout.draw(result)
    assert figure is not None
    assert [trace["type"] for trace in figure.to_dict()["data"]].count("heatmap") == 1


@pytest.mark.parametrize(
    ("ends", "labels"),
    [
        ((0.5, 200.0), ["1", "10", "100"]),
        ((1.5, 40.0), ["3", "10", "30"]),
        ((3.0, 9.0), ["3", "6", "9"]),
        ((31.0, 34.0), ["32"]),
    ],
)
def test_logarithmic_axes_have_few_and_even_labels(ends, labels):
    assert list(choose_log_ticks(*ends).values()) == labels


def test_a_single_row_is_sure_of_no_head_and_no_recall(monkeypatch):
    model = with_mixer(monkeypatch, Shown, "UM*2")
    found = subject(rows=1, model=model)
    plant(model, 0, found.batch, ("previous token", "previous token"))
    plant(model, 1, found.batch, ("induction", "induction"))
    scores, _ = heads.measure(found)
    assert isinstance(scores, HeadScores)
    assert scores.find_patterns() == []
    assert heads.describe(scores).says.startswith("Undecided, because one row of the batch has no")
    [result] = rollout.measure(found)
    assert np.isnan(result.interval).all()
    assert rollout.describe(result).says.startswith("It is not sure whether recall shows")


@pytest.mark.parametrize(
    ("interval", "opening"),
    [
        ((0.21, 0.4), "Through all 2 layers queries reach"),
        ((0.1, 0.4), "It is not sure whether recall shows"),
        ((0.1, 0.19), "No recall shows"),
    ],
)
def test_recall_shows_in_a_rollout_by_its_interval(interval, opening):
    [result] = rollout.measure(subject(rows=4))
    told = replace(result, interval=interval, uniform_value=0.1)
    assert rollout.describe(told).says.startswith(opening)

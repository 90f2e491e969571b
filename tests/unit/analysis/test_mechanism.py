"""A known mechanism gets its label, placebos do nothing, and every share is the loop over rows."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from analysis import mechanism
from analysis.base import NotApplicableError, Subject
from analysis.links import PAIR_LINKS
from analysis.mechanism import describe, draw, effects, measure
from analysis.mechanism.components import Components, find_carriers, measure_components
from analysis.mechanism.cues import Cues, Measured, measure_cues
from analysis.mechanism.edits import ARMS, Edited
from analysis.mechanism.effects import SITES, Restored, edit, measure_baseline, restore
from analysis.mechanism.label import Mechanism, classify
from analysis.mechanism.swapped_keys import Couples, draw_couples, permute_tokens
from analysis.record import to_plain
from analysis.scoring import scored
from lab.laws import MatrixMixer
from lab.layers.attention import Attention
from lab.models import Block, build
from lab.models.language_model import LanguageModel
from tasks.base import IGNORE, Batch
from tasks.mqar import MQAR
from tests import mechanisms

ROWS = mechanisms.TASK.batch(split="test", size=12)


def results(model: LanguageModel, batch: Batch = ROWS) -> tuple[Mechanism, Edited | None]:
    found = measure(Subject(mechanisms.TASK, model, batch))
    mechanism, edited = found[0], found[1] if len(found) > 2 else None
    assert isinstance(mechanism, Mechanism)
    assert edited is None or isinstance(edited, Edited)
    return mechanism, edited


@cache
def known(name: str) -> tuple[Mechanism, Edited | None]:
    """Measure a planted model once."""
    return results(MAKERS[name]())


MAKERS = {
    "induction": mechanisms.induction,
    "induction by SSD": mechanisms.ssd_induction,
    "induction over four blocks": mechanisms.deep_induction,
    "direct in layer 1": mechanisms.direct,
    "direct in layer 0": lambda: mechanisms.direct("AN AN", 0),
    "direct in one block": lambda: mechanisms.direct("AN", 0),
    "positional": mechanisms.positional,
    "mixed": mechanisms.mixed,
    "undecided, untrained": mechanisms.untrained,
    "undecided, always one value": mechanisms.constant,
}
"""By name, which begins with the right label."""


def generator() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("name", MAKERS)
def test_a_planted_mechanism_gets_its_label(name):
    found, _ = known(name)
    assert name.startswith(found.label)
    assert describe(found).says.startswith(found.label.capitalize())
    assert to_plain(found)["label"] == found.label


@pytest.mark.parametrize("name", ["induction", "induction by SSD"])
def test_what_each_intervention_does_to_induction(name):
    found, edited = known(name)
    assert found.restored is not None
    assert edited is not None
    # The planted attention leaks e⁻²⁵ of its mass, the planted SSD e⁻⁶ of what it gathers.
    inner = dict(zip(SITES, found.restored.share[:, 1], strict=True))
    assert inner.pop("value") == pytest.approx(1, abs=0.01)
    assert list(inner.values()) == pytest.approx([0] * 4, abs=0.01)
    # Without its edge nothing tells the two values apart; gathered in layer 0, read in layer 1.
    write, read = ARMS.index("value → key"), effects.ARMS.index("query → value")
    assert edited.left[write] == pytest.approx([0.5, 1], abs=0.05)
    assert edited.left[read] == pytest.approx([1, 0.5], abs=0.05)
    assert edited.left[2] == pytest.approx([1, 0], abs=0.02)
    assert edited.placebo == pytest.approx(np.ones((3, 2)), abs=0.02)
    assert edited.followed.tolist() == [0, 1]
    assert edited.placebo_followed.tolist() == [0, 0]


def test_keys_or_queries_carry_a_direct_answer():
    for layer, site in ((0, "query"), (1, "key")):
        found, _ = known(f"direct in layer {layer}")
        assert found.restored is not None
        shares: dict[str, float] = dict(zip(SITES, found.restored.share[:, 1], strict=True))
        assert shares.pop(site) == pytest.approx(1, abs=1e-5)
        assert list(shares.values()) == pytest.approx([0] * 4, abs=1e-5)


def test_couples_are_the_loop_over_rows():
    task = MQAR(seq_len=32, vocab_size=64).replace(n_pairs=(1, 4, 8))
    batch = task.batch(split="test", size=12)
    found = draw_couples(task, batch, generator())
    assert found is not None
    stored = [int((row >= 0).sum()) for row in batch.links["query_pos"]]
    kept = [row for row in range(12) if stored[row] >= 2]
    assert found.query.shape == (len(kept), 1, 2)
    assert found.valid.all()
    for i, row in enumerate(kept):
        clean: list[int] = batch.inputs[row].tolist()
        corrupt: list[int] = found.corrupt.inputs[i].tolist()
        assert found.clean.inputs[i].tolist() == clean
        keys: list[int] = found.key[i].flatten().tolist()
        assert len(set(keys)) == 2
        for key, other in (keys, keys[::-1]):
            assert corrupt[key] == clean[other]
        assert [j for j in range(32) if corrupt[j] != clean[j]] == sorted(keys)
        for j in range(2):
            query, key, value = (int(z[i, 0, j]) for z in (found.query, found.key, found.value))
            assert clean[query] == clean[key]
            assert value == key + 1
            assert batch.targets[row, query] == clean[value] == found.right[i, 0, j]
            assert task.oracle(found.corrupt)[i, query] == found.wrong[i, 0, j]


@pytest.mark.parametrize("link", ["key_pos", "value_pos"])
def test_permuted_rows_are_the_loop_over_pairs(link):
    task = MQAR(seq_len=32, vocab_size=64).replace(n_pairs=(1, 2, 8))
    batch = task.batch(split="test", size=12)
    found, given = permute_tokens(batch, link, generator())
    for row in range(12):
        expected = batch.inputs[row].tolist()
        places = [p for p in batch.links[link][row].tolist() if p >= 0]
        for pair, place in enumerate(places):
            expected[place] = batch.inputs[row, places[given[row, pair]]].item()
            assert given[row, pair] != pair or len(places) == 1
        assert found.inputs[row].tolist() == expected
        assert sorted(given[row, : len(places)].tolist()) == list(range(len(places)))


def chosen(stack: str) -> tuple[LanguageModel, Couples]:
    options = {"S.dt_init": "paper"} if "S" in stack else {}
    vocab_size = mechanisms.VOCAB
    model = build(stack, vocab_size=vocab_size, d_model=16, n_heads=2, options=options)
    model = model.double().eval()
    found = draw_couples(mechanisms.TASK, ROWS[:6], generator())
    assert found is not None
    # Random weights move the margin either way: rows where it is moved down make the sum ≤ 0.
    known = measure_baseline(model, found)
    moved = (known.clean - known.corrupt).sum((1, 2)) > 0
    assert moved.sum() >= 2
    return model, replace(found, valid=found.valid & moved[:, None])


def one_margin(logits: torch.Tensor, pairs: Couples, row: int, j: int) -> float:
    """Margin of logits [t v] of a row."""
    at = logits[pairs.query[row, 0, j]]
    return (at[pairs.right[row, 0, j]] - at[pairs.right[row, 0, 1 - j]]).item()


@torch.no_grad()
@pytest.mark.parametrize("stack", ["AM*3", "SM*2"])
def test_restoring_is_the_loop_over_rows(stack):
    model, pairs = chosen(stack)
    found = restore(model, pairs, measure_baseline(model, pairs), generator())
    n_layers = len(model.blocks)
    assert found.depths.tolist() == list(range(n_layers + 1))
    assert found.queries == 2 * int(pairs.valid.sum()) >= 4
    for depth in range(n_layers + 1):
        above: dict[str, float] = dict.fromkeys(SITES[:4], 0.0)
        below = 0.0
        for row in pairs.valid[:, 0].nonzero()[:, 0].tolist():
            sites = [set(z[row].flatten().tolist()) for z in (pairs.key, pairs.value, pairs.query)]
            sites.append(set(range(16)) - sites[0] - sites[1] - sites[2])
            clean = model.embed(pairs.clean.inputs[row : row + 1])
            corrupt = model.embed(pairs.corrupt.inputs[row : row + 1])
            for block in model.blocks[:depth]:
                clean, corrupt = block(clean), block(corrupt)
            for site, positions in (("none", set()), *zip(SITES[:4], sites, strict=True)):
                x = corrupt.clone()
                for position in positions:
                    x[0, position] = clean[0, position]
                for block in model.blocks[depth:]:
                    x = block(x)
                logits = model.head(model.norm_final(x))[0]
                whole = model(pairs.clean.inputs[row : row + 1])[0]
                none = model(pairs.corrupt.inputs[row : row + 1])[0]
                for j in range(2):
                    left = one_margin(none, pairs, row, j)
                    if site == "none":
                        below += one_margin(whole, pairs, row, j) - left
                    else:
                        above[site] += one_margin(logits, pairs, row, j) - left
        expected = [of / below for of in above.values()]
        assert found.share[:4, depth].tolist() == pytest.approx(expected, abs=1e-8)


class Edit(nn.Module):
    """A mixer by its matrix, edited for one row and couple."""

    def __init__(self, inner: nn.Module, arm: int, pairs: Couples, row: int):
        super().__init__()
        assert isinstance(inner, MatrixMixer)
        self.inner, self.arm = inner, arm
        self.query, self.key, self.value = (
            z[row, 0].tolist() for z in (pairs.query, pairs.key, pairs.value)
        )

    def forward(self, x):
        inner = self.inner
        assert isinstance(inner, MatrixMixer)
        matrix, values = inner.matrix(x).clone(), inner.values(x).clone()
        for j in range(2):
            i, s = [(self.query[j], self.value[j]), (self.value[j], self.key[j]), (0, 0)][self.arm]
            if self.arm < 2:
                for head in range(matrix.shape[1]):
                    matrix[0, head, i, s] = 0
                    if isinstance(inner, Attention):
                        matrix[0, head, i] /= matrix[0, head, i].sum()
        if self.arm == 2:
            values[:, :, self.value] = values[:, :, self.value[::-1]]
        return inner.project(x, matrix @ values)


@torch.no_grad()
@pytest.mark.parametrize("stack", ["AM*2", "SM*2"])
def test_editing_is_the_loop_over_rows(stack):
    model, pairs = chosen(stack)
    known = measure_baseline(model, pairs)
    found = edit(model, pairs, known, generator())
    assert found is not None
    assert found.layers.tolist() == [0, 1]
    for layer in range(2):
        for arm in range(3):
            above = below = followed = asked = 0.0
            for row in pairs.valid[:, 0].nonzero()[:, 0].tolist():
                block = model.blocks[layer]
                assert isinstance(block, Block)
                inner = block.mixer
                assert inner is not None
                block.mixer = Edit(inner, arm, pairs, row)
                logits = model(pairs.clean.inputs[row : row + 1])[0]
                block.mixer = inner
                whole = model(pairs.clean.inputs[row : row + 1])[0]
                none = model(pairs.corrupt.inputs[row : row + 1])[0]
                for j in range(2):
                    left = one_margin(none, pairs, row, j)
                    above += one_margin(logits, pairs, row, j) - left
                    below += one_margin(whole, pairs, row, j) - left
                    answer = logits[pairs.query[row, 0, j]].argmax()
                    followed += answer.item() == pairs.right[row, 0, 1 - j].item()
                    asked += 1
            assert found.left[arm, layer] == pytest.approx(above / below, abs=1e-8)
            if arm == 2:
                assert found.followed[layer] == pytest.approx(followed / asked)


def test_where_couples_take_turns_one_pass_finds_the_same(monkeypatch):
    batch = mechanisms.LARGE.batch(split="test", size=8)
    model = mechanisms.induction()
    found = draw_couples(mechanisms.LARGE, batch, generator())
    assert found is not None
    assert found.query.shape[1] == 6
    before, passes = measure_baseline(model, found), []
    monkeypatch.setattr(effects, "scored", lambda *given: passes.append(1) or scored(*given))
    every = edit(model, found, before, generator())
    assert len(passes) == 2 * 6
    monkeypatch.setattr(effects, "MATRIX_ENTRIES", 1)
    some = edit(model, found, before, generator())
    assert len(passes) == 2 * 6 + 2
    assert every is not None
    assert some is not None
    assert (every.rows, some.rows) == (8, 4)
    # Each of six couples takes one arm in one pass; what leaks among 24 pairs is small.
    assert some.left == pytest.approx(every.left, abs=0.05)
    assert some.placebo == pytest.approx(every.placebo, abs=0.02)
    assert some.followed == pytest.approx(every.followed)


@torch.no_grad()
def test_what_answers_follow_is_the_loop_over_queries():
    for make, share in ((mechanisms.induction, (1, 0)), (mechanisms.positional, (0, 1))):
        model = make()
        found = measure_cues(Subject(mechanisms.TASK, model, ROWS), ROWS, generator())
        assert (found.key.value, found.position.value) == share
    model = mechanisms.direct()
    # The lower half of the values alone can be answered.
    model.head.weight[mechanisms.VOCAB * 3 // 4 :] = 0
    found = measure_cues(Subject(mechanisms.TASK, model, ROWS), ROWS, generator())
    rng = generator()
    keys, _ = permute_tokens(ROWS, "key_pos", rng)
    right = 0
    for row in range(len(ROWS.inputs)):
        query = ROWS.links["query_pos"][row]
        before, after = model(ROWS.inputs[row : row + 1])[0], model(keys.inputs[row : row + 1])[0]
        for q in query.tolist():
            now = mechanisms.TASK.oracle(keys)[row, q]
            right += bool(before[q].argmax() == ROWS.targets[row, q] and after[q].argmax() == now)
    assert 0 < right < ROWS.links["query_pos"].numel()
    assert found.key.value == pytest.approx(right / ROWS.links["query_pos"].numel())


def cue(key: float, position: float, half: float = 0.02) -> Cues:
    def measured(value: float) -> Measured:
        return Measured("", value, (value - half, value + half))

    either = key + position
    return Cues(*map(measured, (key, position, either, position / either if either else np.nan)))


def carried(value: float, key: float = 0.0, query: float = 0.0, placebo=0.0, half=0.02) -> Restored:
    inner = np.array([key, value, query, 0.0, placebo])[:, None]
    share = np.concatenate([np.eye(5)[:, :1], inner, np.eye(5)[:, 2:3]], 1)
    interval = np.stack([share - half, share + half], -1)
    return Restored(np.array([0, 1, 2]), share, interval, 8, 16)


@pytest.mark.parametrize(
    ("cues", "restored", "label"),
    [
        (cue(0.9, 0.0), carried(0.9), "induction"),
        (cue(0.3, 0.0), carried(0.9), "induction"),
        (cue(0.21, 0.0), carried(0.9), "undecided"),
        (cue(0.0, 0.0), carried(0.9), "undecided"),
        (cue(0.9, 0.0), carried(0.66), "undecided"),
        (cue(0.9, 0.0), carried(0.5), "mixed"),
        (cue(0.9, 0.0), carried(0.34), "undecided"),
        (cue(0.9, 0.0), carried(0.1, key=0.9), "direct"),
        (cue(0.9, 0.0), carried(0.1, query=0.9), "direct"),
        (cue(0.9, 0.0), carried(0.1, key=0.5, query=0.5), "undecided"),
        (cue(0.9, 0.0), carried(0.9, placebo=0.4), "undecided"),
        (cue(0.9, 0.0), carried(np.nan), "undecided"),
        (cue(0.9, 0.0), carried(0.9, half=np.nan), "undecided"),
        (cue(0.9, 0.0), None, "undecided"),
        (cue(0.1, 0.8), None, "positional"),
        (cue(0.4, 0.4), carried(0.9), "mixed"),
        (cue(0.6, 0.3), carried(0.9), "undecided"),
        (cue(0.9, 0.0, half=np.nan), carried(0.9), "undecided"),
    ],
)
def test_the_label_abstains_where_an_interval_reaches_over_a_threshold(cues, restored, label):
    assert classify(cues, restored, None)[0] == label


def left(values: float, others: float, half: float = 0.02) -> Edited:
    """Return what exchanging values, and other positions, leaves in a model's one block."""
    shares = [np.array([[1.0], [0.5], [share]]) for share in (values, others)]
    ends = [np.stack([share - half, share + half], -1) for share in shares]
    none = np.zeros(1)
    return Edited(np.zeros(1, np.int64), shares[0], ends[0], shares[1], ends[1], none, none, 8)


@pytest.mark.parametrize(
    ("edited", "label"),
    [
        (left(0.0, 1.0), "direct"),
        (left(0.34, 1.0), "undecided"),
        (left(1.0, 1.0), "undecided"),
        (left(0.0, 0.6), "undecided"),
        (left(0.0, 1.0, half=np.nan), "undecided"),
        (None, "undecided"),
    ],
)
def test_one_block_is_direct_only_where_the_answer_goes_with_the_values(edited, label):
    ends = np.eye(5)[:, [0, 2]]
    restored = Restored(np.array([0, 1]), ends, np.stack([ends, ends], -1), 8, 16)
    found, reason, told = classify(cue(0.9, 0.0), restored, edited)
    assert found == label
    assert (found == "undecided") == ("no inner depth" in reason)
    assert len(told) == (2 if edited is None else 4)


def test_a_label_from_some_depths_says_of_how_many():
    shares = np.stack([carried(0.1, key=0.9).share[:, 1]] * 4, 1)
    ends = np.stack([shares - 0.02, shares + 0.02], -1)
    for last, said in ((3, "at any depth"), (12, "at the 2 of 11 depths tried")):
        restored = Restored(np.array([0, 1, 2, last]), shares, ends, 8, 16)
        label, reason, _ = classify(cue(0.9, 0.0), restored, None)
        assert (label, reason) == ("direct", f"no value's position carries its key {said}")


def test_a_ratio_over_what_may_be_nothing_has_no_interval():
    sums = np.stack([np.ones(8), [1, 1, 1, 1, 1, 1, 1, -5.0]], 1)
    value, ends = effects.estimate_share(sums, generator())
    assert value == pytest.approx(4)
    assert np.isnan(ends).all()
    value, ends = effects.estimate_share(np.ones((8, 2)), generator())
    assert (value, ends) == (1, (1, 1))


@torch.no_grad()
@pytest.mark.parametrize("stack", ["AM*2", "SM NM"])
def test_components_are_the_loop_over_rows(stack):
    model, pairs = chosen(stack)
    found = measure_components(model, pairs, measure_baseline(model, pairs), generator())
    kinds = ["mixer", "transform"]
    named = [*zip(found.layers.tolist(), found.components, strict=True)]
    every = [(layer, kind) for layer in (0, 1) for kind in kinds]
    assert named == [one for one in every if stack != "SM NM" or one != (1, "mixer")]
    for n, (layer, kind) in enumerate(named):
        above, below = [0.0] * 3, 0.0
        for row in pairs.valid[:, 0].nonzero()[:, 0].tolist():
            batches = (pairs.clean.inputs, pairs.corrupt.inputs)
            residuals, added = [], []
            for inputs in batches:
                x = model.embed(inputs[row : row + 1])
                for i, block in enumerate(model.blocks):
                    assert isinstance(block, Block)
                    for part, norm, name in (
                        (block.mixer, block.norm_mixer, "mixer"),
                        (block.mlp, block.norm_mlp, "transform"),
                    ):
                        if (i, name) == (layer, kind):
                            assert part is not None
                            assert norm is not None
                            residuals.append(x)
                            added.append(part(norm(x)))
                        x = x if part is None or norm is None else x + part(norm(x))
            whole, none = (model(inputs[row : row + 1])[0] for inputs in batches)
            for s, places in enumerate((pairs.key, pairs.value, pairs.query)):
                x = residuals[1] + added[1]
                for position in places[row].flatten().tolist():
                    x[0, position] = residuals[1][0, position] + added[0][0, position]
                block = model.blocks[layer]
                assert isinstance(block, Block)
                if kind == "mixer" and block.mlp is not None:
                    assert block.norm_mlp is not None
                    x = x + block.mlp(block.norm_mlp(x))
                for later in model.blocks[layer + 1 :]:
                    x = later(x)
                logits = model.head(model.norm_final(x))[0]
                for j in range(2):
                    above[s] += one_margin(logits, pairs, row, j) - one_margin(none, pairs, row, j)
            for j in range(2):
                below += one_margin(whole, pairs, row, j) - one_margin(none, pairs, row, j)
        assert found.share[n, :3].tolist() == pytest.approx([a / below for a in above], abs=1e-8)


@pytest.mark.parametrize("name", ["induction", "positional", "undecided, untrained"])
def test_planted_components_are_named_and_no_others(name):
    results = measure(Subject(mechanisms.TASK, MAKERS[name](), ROWS))
    found = [result for result in results if isinstance(result, Components)]
    if name == "induction":
        assert sorted(find_carriers(found[0])) == [(0, 1), (1, 2)]
        says = describe(found[0]).says
        assert "layer 0's mixer at the values 1.00 (" in says
        assert "placebo 0.00" in says
        assert draw(found[0]) is not None
    for one in found if name != "induction" else []:
        assert find_carriers(one) == []
        assert describe(one).says.startswith("No single component surely restores a third")


def test_a_component_is_named_by_chance_in_few_of_a_hundred_cases():
    """Shares that are a third, the least that is not named, with intervals from 12 rows."""
    rng, named = np.random.default_rng(0), 0
    for _ in range(100):
        rows = np.stack([rng.normal(1 / 3, 0.2, 12), np.ones(12)], 1)
        value, ends = effects.estimate_share(rows, rng)
        share, interval = np.full((1, 4), value), np.tile(ends, (1, 4, 1)).astype(float)
        share[0, -1], interval[0, -1] = 0, (-0.01, 0.01)
        one = Components(np.zeros(1, int), ("mixer",), share, interval, 12, 24, 1)
        named += bool(find_carriers(one))
    # 2.5 % by the interval, which 12 rows make a point or two short; two standard errors are 4.
    assert named <= 8


def test_depths_of_a_deep_model_are_spread(monkeypatch):
    monkeypatch.setattr(effects, "DEPTHS", 3)
    model = build("NN*8 AN", vocab_size=mechanisms.VOCAB, d_model=16).eval()
    found = draw_couples(mechanisms.TASK, ROWS[:2], generator())
    assert found is not None
    depths = restore(model, found, measure_baseline(model, found), generator()).depths
    assert depths.tolist() in ([0, 1, 4, 8, 9], [0, 1, 5, 8, 9])


def test_one_row_has_no_interval_and_so_no_label():
    found, _ = results(mechanisms.induction(), ROWS[:1])
    assert found.label == "undecided"


def unlinked(batch: Batch) -> Batch:
    return replace(batch, links={})


def unmoved(batch: Batch) -> Batch:
    """Queries that ask for nothing stored: their answers do not change with the keys."""
    links = {name: batch.links[name] for name in PAIR_LINKS}
    targets = torch.where(batch.targets == IGNORE, IGNORE, 0)
    return replace(batch, targets=targets, links=links)


@pytest.mark.parametrize(
    ("task", "change", "why"),
    [
        (mechanisms.TASK, unlinked, "store no pairs"),
        (replace(mechanisms.TASK, n_pairs=1), lambda batch: batch, "two pairs"),
        (mechanisms.TASK, unmoved, "do not change places"),
    ],
)
def test_where_there_is_nothing_to_exchange_it_says_so(task, change, why):
    batch = change(task.batch(split="test", size=3))
    with pytest.raises(NotApplicableError, match=why):
        measure(Subject(task, mechanisms.untrained(), batch))


def test_figures_show_every_site_and_edit():
    found, edited = known("induction")
    assert edited is not None
    fig, dots = draw(found), draw(edited)
    assert fig is not None
    assert dots is not None
    lines = fig.to_dict()["data"]
    assert [line["name"] for line in lines] == ["keys", "values", "queries", "all else", "placebo"]
    assert len(dots.to_dict()["data"]) == 6
    assert "100.0 % of answers with them in layer 1 (placebo 0.0 %)" in describe(edited).says
    untrained, _ = known("undecided, untrained")
    assert (untrained.restored is None) == (draw(untrained) is None)
    assert mechanism.TITLE.endswith("?")

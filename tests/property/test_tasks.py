"""Laws of the rows of every task, whatever the options."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import TASKS
from tasks.base import IGNORE, Batch, Links, Task, count_right
from tasks.mixture import Mixture
from tests.task_cases import CASES, PAIRS

seeds = st.integers(-(2**63), 2**64)
every_case = pytest.mark.parametrize(
    ("name", "options"), PAIRS, ids=[f"{name}-{options}" for name, options in PAIRS]
)
every_task = pytest.mark.parametrize("name", list(TASKS))


def tensors(batch: Batch) -> dict[str, torch.Tensor]:
    return {
        "inputs": batch.inputs,
        "targets": batch.targets,
        "roles": batch.roles,
        **batch.links,
    }


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors have the same bits; unscored numbers are NaN."""
    if one.is_floating_point():
        one, other = one.view(torch.int32), other.view(torch.int32)
    return one.equal(other)


def score(task: Task, answers: torch.Tensor, batch: Batch) -> float:
    right = count_right(answers, batch.find_nearest(answers))
    return (right.sum() / task.count_asked(batch).sum()).item()


def test_every_task_has_cases():
    assert list(CASES) == list(TASKS)


@every_case
@settings(max_examples=3)
@given(data=st.data(), seed=seeds, start=st.integers(0, 2**30))
def test_a_row_depends_on_its_number_alone(name, options, data, seed, start):
    task = TASKS[name](**options)
    split = data.draw(st.sampled_from(task.splits))
    whole = tensors(task.batch(split=split, start=start, size=5, seed=seed))
    alone = [tensors(task.batch(split=split, start=start + i, size=1, seed=seed)) for i in range(5)]
    backwards = tensors(task.generate(split, torch.arange(start, start + 5).flip(0), seed))
    for key, tensor in whole.items():
        assert same(tensor, torch.cat([row[key] for row in alone])), key
        assert same(tensor, backwards[key].flip(0)), key


@every_case
@settings(max_examples=3)
@given(data=st.data(), seed=seeds)
def test_rows_are_what_a_batch_promises(name, options, data, seed):
    task = TASKS[name](**options)
    split = data.draw(st.sampled_from(task.splits))
    batch = task.batch(split=split, size=4, seed=seed)
    for key, tensor in tensors(batch).items():
        numbers = task.vectors and key in ("inputs", "targets")
        assert tensor.dtype == (torch.float32 if numbers else torch.int64), key
        assert len(tensor) == 4, key
        if key.endswith("_pos"):
            assert ((tensor >= -1) & (tensor < task.seq_len)).all(), key
    for tensor in (batch.inputs, batch.targets, batch.roles):
        assert tensor.shape[:2] == (4, task.seq_len)
    if task.vectors:
        widths = batch.inputs.shape[2], batch.targets.shape[2]
        assert widths == (task.sizes["d_input"], task.sizes["d_output"])
        assert batch.inputs.isfinite().all()
        assert batch.targets[batch.scored].isfinite().all()
    else:
        assert ((batch.inputs >= 0) & (batch.inputs < task.vocab_size)).all()
        known = (batch.targets >= 0) & (batch.targets < task.vocab_size)
        assert known[batch.targets != IGNORE].all()
    assert batch.scored.any(1).all()
    assert ((batch.roles >= 0) & (batch.roles < len(task.role_names))).all()


READ_BY_ORACLES = {
    "memorize": {"map"},
    "language": {"symbol_of", "next_state"},
    "bytes": {"offset"},
    "capo": {"map"},
}
"""Links that say what no row shows: the facts, the automaton, the place in the text."""


@every_case
@settings(max_examples=3)
@given(data=st.data(), seed=seeds)
def test_oracle_is_right_and_needs_the_inputs_alone(name, options, data, seed):
    task = TASKS[name](**options)
    split = data.draw(st.sampled_from(task.splits))
    batch = task.batch(split=split, size=4, seed=seed)
    answers = task.oracle(batch)
    if not task.stochastic:
        assert score(task, answers, batch) == 1
    read = READ_BY_ORACLES.get(name, set()) | ({"setting"} if isinstance(task, Mixture) else set())
    links = {key: batch.links[key] for key in read}
    blank = torch.zeros_like(batch.targets), torch.zeros_like(batch.roles)
    again = task.oracle(Batch(batch.inputs, *blank, links))
    assert same(again, answers)


@pytest.mark.parametrize(("name", "options"), [pair for pair in PAIRS if pair[0] != "language"])
@settings(max_examples=3)
@given(seed=seeds)
def test_links_lead_from_each_question_to_its_answer(name, options, seed):
    task = TASKS[name](**options)
    batch = task.batch(split="test", size=8, seed=seed)
    links, query = batch.links, batch.links["query_pos"]
    asked = query >= 0
    row = torch.arange(8)[:, None].expand_as(query)[asked]
    scored = [tuple(place) for place in batch.scored.nonzero().tolist()]
    assert sorted(zip(row.tolist(), query[asked].tolist(), strict=True)) == scored
    for key, link in links.items():
        if link.shape[:2] == query.shape and key not in ("setting", "map"):
            assert (link[~asked] == -1).all(), key
    if (value := links.get("value_pos", links.get("answer_pos"))) is None:
        return
    answer = value[asked]
    assert batch.inputs[row, answer].equal(batch.targets[row, query[asked]])
    assert links["distance"][asked].equal((query - value)[asked])
    if "key_pos" in links:
        # A copy's first token follows no key; a marker and a read are no key's token.
        known = (key := links["key_pos"][asked]) >= 0
        assert (answer - key == 1)[known].all()
        if name not in ("copy", "flip_flop"):
            assert batch.inputs[row, key].equal(batch.inputs[row, query[asked]])


@every_task
def test_no_shortcut_solves_it(name: str):
    task = TASKS[name]()
    # Where the oracle errs, too, it takes more rows to tell them apart.
    batch = task.batch(split="test", size=256 if task.stochastic else 64)
    best = score(task, task.oracle(batch), batch)
    assert (task.chance == 0) == task.vectors
    assert 0 <= task.chance < best
    for rule, predict in task.shortcuts().items():
        assert score(task, predict(batch), batch) < best, rule


@every_task
def test_splits_and_seeds_have_rows_of_their_own(name: str):
    task = TASKS[name]()
    rows = [
        str(row)
        for split in task.splits
        for seed in range(2)
        for row in task.batch(split=split, size=50, seed=seed).inputs.tolist()
    ]
    assert len(set(rows)) == 100 * len(task.splits)


@every_task
def test_presets_and_evaluations_can_be_made(name: str):
    kind = TASKS[name]
    assert set(kind.presets) == {"small", "published"}
    assert kind.separates
    for preset in kind.presets.values():
        assert preset.source
        task = kind(**preset.options)
        assert task.batch(size=1).inputs.shape[:2] == (1, task.seq_len)
    for option, values in kind.evaluations.items():
        for value in values:
            assert kind().replace(**{option: value}).vocab_size == kind().vocab_size


def options_of(kind: type[Task], *types: type) -> list[str]:
    return [f.name for f in fields(kind) if f.init and type(f.default) in types]


@every_task
def test_numbers_out_of_bounds_are_named(unchecked, name: str):
    kind = TASKS[name]
    wrong = [(option, -1) for option in options_of(kind, int, float)]
    wrong += [(option, 2**40) for option in options_of(kind, int)]
    wrong += [
        (option, 0) for option in ("seq_len", "vocab_size") if option in options_of(kind, int)
    ]
    for option, number in wrong:
        with pytest.raises(ValueError, match=f"{option}={number}"):
            kind(**{option: number})


@every_task
@settings(max_examples=3)
@given(seed=seeds)
def test_a_row_of_a_mixture_is_its_parts_row(name, seed):
    small = TASKS[name](**TASKS[name].presets["small"].options)
    mixed = small.replace(seq_len=(small.seq_len, small.seq_len * 3 // 2 // 4 * 4))
    assert isinstance(mixed, Mixture)
    batch = mixed.batch(size=6, seed=seed)
    for row, setting in enumerate(batch.links["setting"][:, 0].tolist()):
        part = mixed.parts[setting]
        alone = part.batch(start=row, size=1, seed=seed)
        assert batch.inputs[row, : part.seq_len].equal(alone.inputs[0])
        assert same(batch.targets[row, : part.seq_len], alone.targets[0])
        assert not batch.scored[row, part.seq_len :].any()
    if not mixed.stochastic:
        assert score(mixed, mixed.oracle(batch), batch) == 1


@pytest.mark.gpu
@every_case
def test_cpu_and_cuda_agree(name: str, options: dict[str, Any]):
    task = TASKS[name](**options)
    for split in task.splits:
        here = tensors(task.batch(split=split, size=8))
        there = tensors(task.batch(split=split, size=8, device="cuda").to("cpu"))
        for key, tensor in here.items():
            assert same(tensor, there[key]), key


def test_links_are_made_when_looked_at():
    made = []
    links = Links(lambda: made.append(1) or {"query_pos": torch.zeros(1, 1)})
    assert not made
    assert len(links) == 1
    assert made

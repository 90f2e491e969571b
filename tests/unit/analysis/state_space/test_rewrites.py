"""Old values around the rewrites of their keys, and answers without those rewrites, by loops."""

import numpy as np
import pytest
import torch
from torch import Tensor

from analysis.base import NotApplicableError, Subject
from analysis.links import Offsets
from analysis.state_space import erasure
from analysis.state_space.rewrites import (
    AFTER,
    ARMS,
    BEFORE,
    Held,
    find_writes,
    silence,
    sum_held,
)
from lab.hooks import HookPoint
from lab.models import build
from tasks.mqar import MQAR
from tasks.overwrite import Overwrite

TASK = Overwrite(seq_len=40, n_pairs=3, rewrites=2, vocab_size=32)


def subject(stack: str, task: Overwrite | MQAR = TASK, rows: int = 6) -> Subject:
    torch.manual_seed(0)
    model = build(stack, vocab_size=32, d_model=16, n_heads=2).eval()
    return Subject(task, model, task.batch(split="test", size=rows))


def test_writes_are_those_of_the_row():
    batch = TASK.batch(size=4)
    for row, writes in enumerate(find_writes(batch)):
        tokens = batch.inputs[row].tolist()
        assert sorted(writes.key.tolist()) == list(range(0, 18, 2))
        for query, key, value, following in zip(
            *(z.tolist() for z in (writes.query, writes.key, writes.value, writes.following)),
            strict=True,
        ):
            later = [i for i in range(key + 2, 18, 2) if tokens[i] == tokens[key]]
            assert (value, following) == (key + 1, later[0] + 1 if later else -1)
            assert tokens[query] == tokens[key]
            assert query >= 18
        assert (writes.rewrite == ~writes.again).all()
    once = Overwrite(seq_len=40, n_pairs=3, rewrites=0, vocab_size=32)
    for task in (once, MQAR(seq_len=16, vocab_size=32)):
        assert find_writes(task.batch(size=2)) == []


@pytest.mark.parametrize("read", [0, 1])
def test_what_is_held_around_rewrites_is_the_loop(read):
    rng = np.random.default_rng(0)
    held, erased = rng.normal(size=(2, 3, 2, 40, 40))
    weight = rng.random((3, 2, 40))
    writes = find_writes(TASK.batch(size=3))
    left, taken, size = (torch.from_numpy(z) for z in (held, erased, weight))
    sums = sum_held(left, taken, size, writes, read)
    expected = np.zeros_like(sums)
    for row, of in enumerate(writes):
        start, until = (of.value + read).tolist(), (of.following + read).tolist()
        for old, at in zip(start, until, strict=True):
            if at < read:
                continue
            for other, end in zip(start, until, strict=True):
                until_then = end < read or end > at + AFTER
                arm = 0 if other == old else 1 if until_then else None
                if arm is None or other > at - BEFORE:
                    continue
                for d in range(-BEFORE, AFTER + 1):
                    share = weight[row, :, other]
                    gone = erased[row, :, at - BEFORE + 1 : at + d + 1, other].sum(1)
                    expected[:, row, arm, d + BEFORE, 0] += share * held[row, :, at + d, other]
                    expected[:, row, arm, d + BEFORE, 1] += share * gone
    np.testing.assert_allclose(sums, expected, atol=1e-9)
    shares = Held.of(np.zeros(2, int), np.arange(2), np.abs(sums), 0)
    np.testing.assert_allclose(shares.held[..., 0], 1)
    total = np.abs(sums).sum(1)
    np.testing.assert_allclose(shares.erased, total[:, :, -1, 1] / total[:, :, 0, 0])


@pytest.mark.parametrize("read", [0, 2])
@torch.no_grad()
def test_a_silenced_layer_answers_as_with_a_hook(read):
    """Against zeros set by hand at the latest writes, and answers counted by loops."""
    found, layer = subject("gdn+M kda+M"), 1
    writes = find_writes(found.batch)
    result = silence(found, found.batch, writes, Offsets(read={layer: read}), [0, layer])
    assert result.answers == 18
    for arm, hook in enumerate(ARMS):

        def zero(tensor: Tensor, point: HookPoint) -> Tensor:
            tensor = tensor.clone()
            for row, of in enumerate(writes):
                for value, following in zip(of.value.tolist(), of.following.tolist(), strict=True):
                    if following < 0:
                        tensor[row, value - 1 : value + read + 1] = 0
            return tensor

        name = f"blocks.{layer}.mixer.{hook}"
        logits = found.model.run_with_hooks(found.batch.inputs, [(name, zero)])
        answers, counts = logits.argmax(-1), np.zeros(2)
        for row, of in enumerate(writes):
            for query in of.query.unique().tolist():
                values = of.value[of.query == query].tolist()
                tokens = [int(found.batch.inputs[row, value]) for value in values]
                answer = int(answers[row, query])
                counts += [answer == tokens[-1], answer in tokens[:-1]]
        np.testing.assert_allclose(result.shares[arm, 1], counts / 18)


def test_findings_are_those_that_apply():
    kinds = {
        "gdn+M": ["Held", "Turnover", "Silenced", "Erasures"],
        "gla+M rwkv7+M": ["Held", "Turnover", "Silenced", "Erasures"],
        "gla+M": ["Held"],
        "SM": ["Held"],
        "deltaproduct+M": ["Held", "Turnover", "Silenced", "Erasures"],
    }
    for stack, names in kinds.items():
        found = erasure.measure(subject(stack))
        assert [type(finding).__name__ for finding in found] == names
        for finding in found:
            assert "nan" not in finding.says
            finding.figure()
    held = erasure.measure(subject("SM"))[0]
    assert isinstance(held, Held)
    assert (held.erased == 0).all()
    assert held.says.startswith("No head surely erases more of an old value")
    once = MQAR(seq_len=16, vocab_size=32)
    _, erasures = erasure.measure(subject("gdn+M", once))
    assert isinstance(erasures, erasure.Erasures)
    np.testing.assert_allclose(erasures.left + erasures.decayed + erasures.erased.sum(0), 1)
    for stack, task in (("gla+M", once), ("AM", TASK)):
        with pytest.raises(NotApplicableError, match=r"no mixer takes away|no block has a mixer"):
            erasure.measure(subject(stack, task))

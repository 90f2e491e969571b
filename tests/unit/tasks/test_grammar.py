"""Grammar: its rules, sentences, exact probabilities, links and shortcuts."""

import math
from collections import Counter, defaultdict
from itertools import product

import pytest
import torch

from lab.suite.audit import measure_bits
from tasks.base import accuracy
from tasks.grammar import Grammar, draw_rules
from tests.statistics import assert_uniform

SMALL = Grammar(seq_len=40, depth=2, n_symbols=2, min_rules=2, max_rules=2, min_length=1)


def spell(task: Grammar, level: int, symbol: int) -> dict[tuple[int, ...], float]:
    """Return the probabilities of all that a symbol can become, by trying everything."""
    if level == task.depth:
        return {(symbol,): 1.0}
    found: dict[tuple[int, ...], float] = defaultdict(float)
    sides = task.rules[level][symbol - 1]
    for side in sides:
        parts = [spell(task, level + 1, below).items() for below in side]
        for chosen in product(*parts):
            text = tuple(token for part, _ in chosen for token in part)
            found[text] += math.prod(share for _, share in chosen) / len(sides)
    return found


def test_rules_are_drawn_as_said():
    """Over 3,000 grammars of the sizes of cfg3f."""
    lengths, counts, symbols = [], [], []
    for number in range(3_000):
        rules = draw_rules(number, 6, 3, 3, 4, 2, 3)
        assert [len(level) for level in rules] == [1, 3, 3, 3, 3, 3]
        for level in rules:
            sides = [side for symbol in level for side in symbol]
            assert len(set(sides)) == len(sides)
            counts += [len(symbol) for symbol in level]
        lengths += [len(rules[0][0][0])]
        symbols += [rules[0][0][0][0]]
    assert_uniform(torch.tensor(counts), 3, 5)
    assert_uniform(torch.tensor(lengths), 2, 4)
    assert_uniform(torch.tensor(symbols), 1, 4)


@pytest.mark.parametrize("task", [SMALL, Grammar(seq_len=40, depth=2)])
def test_sentences_are_as_frequent_as_the_rules_say(task: Grammar):
    expected = spell(task, 0, 1)
    sentences = [
        tuple(map(int, text.split()))
        for row in task.batch(size=3_000).inputs.tolist()
        # The last sentence may be cut.
        for text in " ".join(map(str, row)).split("0")[1:-1][:3]
    ]
    found = Counter(sentences)
    assert set(found) <= set(expected)
    common = [text for text, share in expected.items() if share * len(sentences) > 20]
    statistic = sum(
        (found[text] - expected[text] * len(sentences)) ** 2 / (expected[text] * len(sentences))
        for text in common
    )
    assert statistic < len(common) + 5 * math.sqrt(2 * len(common))


@pytest.mark.parametrize("task", [SMALL, Grammar(seq_len=40, depth=2, grammar=3)])
def test_probabilities_of_the_next_token_are_those_of_all_sentences(task: Grammar):
    expected, batch = spell(task, 0, 1), task.batch(split="test", size=20)
    for row, ahead in zip(batch.inputs.tolist(), task.predict(batch.inputs).tolist(), strict=True):
        sentence: tuple[int, ...] = ()
        for token, chances in zip(row, ahead, strict=True):
            sentence = (*sentence, token) if token else ()
            n = len(sentence)
            fits = {t: share for t, share in expected.items() if t[:n] == sentence}
            after: dict[int, float] = defaultdict(float)
            for text, share in fits.items():
                after[text[n] if len(text) > n else 0] += share / sum(fits.values())
            assert chances == pytest.approx([after[v] for v in range(task.vocab_size)])


def test_probabilities_are_calibrated_at_the_published_depth():
    """The mean loss of the exact probabilities is their mean entropy."""
    task = Grammar(seq_len=256, depth=6)
    batch = task.batch(size=12)
    chances = task.predict(batch.inputs)
    loss = -chances.gather(2, batch.targets[:, :, None]).log2()
    entropy = -(chances * chances.clamp(min=1e-300).log2()).sum(2)
    assert chances.sum(2).allclose(torch.ones(1).double())
    assert loss.mean().item() == pytest.approx(entropy.mean().item(), abs=0.05)


def test_after_a_token_that_cannot_come_nothing_can_until_the_next_sentence():
    task = Grammar(seq_len=12, depth=2, n_symbols=2, max_rules=2, min_rules=2)
    chances = task.predict(torch.tensor([[0, 2, 2, 1, 2, 2, 2, 1, 0, 1]]))[0]
    assert (chances[6:8] == 0).all()
    assert chances[[5, 8, 9]].sum(1).tolist() == pytest.approx([1, 1, 1])


def test_links_say_what_may_come_and_under_what():
    task = Grammar(seq_len=60, depth=3)
    batch = task.batch(size=50)
    chances, legal = task.predict(batch.inputs), batch.links["legal"]
    listed = (legal[..., None] == torch.arange(4)).any(2)
    assert listed.equal(chances > 0)
    ancestors = batch.links["ancestors"]
    assert ((ancestors == -1).all(2)).equal(batch.targets == 0)
    assert ((ancestors == -1).any(2)).equal(batch.targets == 0)
    assert (ancestors[:, :, 0][batch.targets > 0] == 1).all()
    for row in range(50):
        for above, token in zip(ancestors[row].tolist(), batch.targets[row].tolist(), strict=True):
            for level, (symbol, below) in enumerate(zip(above, [*above[1:], token], strict=True)):
                assert not token or any(below in s for s in task.rules[level][symbol - 1])


def test_the_oracle_and_the_shortcuts_score_what_they_say():
    task = Grammar()
    batch = task.batch(split="test", size=256)
    scores = {"unigram": 0.38, "bigram": 0.43, "trigram": 0.45, "six tokens": 0.56}
    for name, score in scores.items():
        found = accuracy(task.shortcuts()[name](batch), batch.targets)
        assert found == pytest.approx(score, abs=0.012), name
    assert accuracy(task.oracle(batch), batch.targets) == pytest.approx(0.62, abs=0.012)


def test_the_grammar_itself_takes_the_bits_of_its_choices():
    batch = SMALL.batch(split="test", size=64)
    bits = SMALL.surprisals()["oracle"](batch)
    assert bits.min() >= 0
    assert bits.isfinite().all()
    found = measure_bits(SMALL, rows=64)
    assert found["oracle"] == pytest.approx(bits[batch.scored].mean().item())
    assert found["oracle"] < math.log2(SMALL.vocab_size)

"""What a model answers where answers are scored, and how sure its accuracy is."""

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

from analysis.scoring import scored
from lab.bench.peak import measure_peak
from lab.intervals import RowAmounts, RowCounts, clustered_wilson, wilson
from lab.layers.mask import reveal_stored
from lab.models import build
from lab.models.evaluation import evaluate, find_stored_positions, score
from lab.ops.cross_entropy import linear_cross_entropy
from tasks.base import IGNORE, Batch
from tasks.brevo import Brevo
from tasks.mqar import MQAR

TASK = MQAR(seq_len=16, vocab_size=64)


def model(**options):
    return build("AM", vocab_size=64, d_model=16, **options)


def test_loss_at_scored_positions_is_the_usual_cross_entropy():
    language_model, batch = model(), TASK.batch(size=3)
    loss, correct = linear_cross_entropy(*score(language_model, batch, "fp32"))
    logits, targets = language_model(batch.inputs).flatten(0, 1), batch.targets.flatten()
    usual = F.cross_entropy(logits, targets, ignore_index=IGNORE)
    torch.testing.assert_close(loss, usual, rtol=1e-6, atol=1e-6)
    assert correct == (logits.argmax(-1) == targets).sum()
    for mine, other in zip(
        torch.autograd.grad(loss, list(language_model.parameters())),
        torch.autograd.grad(usual, list(language_model.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_evaluation_is_the_accuracy_over_the_whole_split():
    language_model = model()
    found = evaluate(TASK, language_model, rows=10, rows_at_once=4, seed=0)
    batch = TASK.batch(split="test", size=10)
    asked = batch.targets != IGNORE
    logits = language_model(batch.inputs)[asked]
    assert found.accuracy == (logits.argmax(-1) == batch.targets[asked]).double().mean().item()
    assert found.loss == pytest.approx(
        F.cross_entropy(logits, batch.targets[asked]).item(), rel=1e-5
    )
    assert (found.rows, found.scored) == (10, int(asked.sum()))
    assert found.interval[0] <= found.accuracy < found.interval[1]


def test_each_of_several_right_answers_counts_in_evaluations_and_analyses():
    task = Brevo(seq_len=24, n_nodes=5, max_degree=2, vocab_size=11)
    language_model = build("AM", vocab_size=11, d_model=16)
    torch.manual_seed(0)
    for weight in language_model.parameters():
        torch.nn.init.normal_(weight)  # as built, it repeats its input
    found = evaluate(task, language_model, rows=64, rows_at_once=24, seed=0)
    batch = task.batch(split="test", size=64)
    asked = batch.targets != IGNORE
    answers = language_model(batch.inputs)[asked].argmax(-1)
    right = (batch.links["legal"][asked] == answers[:, None]).any(1)
    assert (right & (answers != batch.targets[asked])).any()
    assert found.accuracy == right.double().mean().item()
    assert scored(language_model, batch).right.equal(right)


def test_an_oracle_mask_is_told_what_the_batch_stores():
    task = MQAR(seq_len=16, vocab_size=64).replace(n_pairs=(1, 3))
    batch = task.batch(size=6)
    keep = find_stored_positions(batch)
    pairs = (batch.roles == 0) | (batch.roles == 1)
    assert torch.equal(keep, pairs)
    told = model(options={"A.mask": "oracle"})
    hidden, _, _ = score(told, batch, "fp32")
    with reveal_stored(told, pairs):
        expected = told.hidden(batch.inputs)[batch.targets != IGNORE]
    torch.testing.assert_close(hidden, expected)
    with pytest.raises(ValueError, match="links must name key_pos and value_pos"):
        score(told, Batch(batch.inputs, batch.targets, batch.roles, {}), "fp32")


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_interval_holds_the_share_however_many_answers(share):
    for count in range(1, 3000, 7):
        low, high = wilson(share, count)
        assert low <= share <= high


def find_interval_slowly(right: list[int], scored: list[int]) -> tuple[float, float]:
    """Return the interval from the definition of the squared error between rows, in fractions."""
    m, n, h = len(scored), sum(scored), sum(right)
    p = Fraction(h, n)
    apart = sum((one - p * all_) ** 2 for one, all_ in zip(right, scored, strict=True))
    between, spread = Fraction(m, m - 1) * apart / n**2, p * (1 - p) / n
    return wilson(float(p), n / max(1.0, float(between / spread)))


def test_rows_counted_in_parts_give_the_interval_of_all():
    generator = torch.Generator().manual_seed(1)
    scored = torch.randint(1, 10**6, (500,), generator=generator)
    right = (scored * torch.rand(500, generator=generator, dtype=torch.float64)).long()
    counts = RowCounts()
    for part in range(0, 500, 7):
        counts.add(right[part : part + 7], scored[part : part + 7])
    slow = find_interval_slowly(right.tolist(), scored.tolist())
    assert counts.find_interval() == pytest.approx(slow, rel=1e-12)
    assert clustered_wilson(right, scored) == counts.find_interval()


def test_the_memory_of_an_evaluation_does_not_grow_with_its_rows():
    task = MQAR(seq_len=8, vocab_size=32)
    model = build("AM", vocab_size=32, d_model=8).eval()

    def measure(rows: int) -> int:
        return measure_peak(lambda: evaluate(task, model, rows=rows, rows_at_once=64, seed=0))

    measure(64)  # makes what is kept
    assert measure(64 * 20) == measure(64 * 2)


@pytest.mark.parametrize("together", [False, True])
def test_the_interval_covers_as_often_as_it_says(together):
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(400):
        if together:
            right = 4 * (torch.rand(60, generator=generator) < 0.8).long()
        else:
            right = (torch.rand(60, 4, generator=generator) < 0.8).long().sum(1)
        low, high = clustered_wilson(right, torch.full((60,), 4))
        covered += low <= 0.8 <= high
    # 95 % of 400, standard deviation 4.4.
    assert 380 - 4 * 4.4 < covered < 380 + 4 * 4.4


def test_the_interval_of_amounts_covers_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(400):
        asked = 1 + torch.rand(200, generator=generator).double()
        right = asked * (0.8 + 0.3 * torch.randn(200, generator=generator).double())
        amounts = RowAmounts()
        for part in (slice(0, 70), slice(70, None)):
            amounts.add(right[part], asked[part])
        assert amounts.share == pytest.approx((right.sum() / asked.sum()).item())
        low, high = amounts.find_interval()
        covered += low <= 0.8 <= high
    assert 380 - 4 * 4.4 < covered < 380 + 4 * 4.4


def test_a_share_of_amounts_stays_between_none_and_all():
    for right, share in ((-2.0, 0.0), (3.0, 1.0)):
        amounts = RowAmounts()
        amounts.add(torch.full((3,), right).double(), torch.ones(3).double())
        assert (amounts.share, amounts.find_interval()) == (share, (share, share))

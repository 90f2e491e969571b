"""What an audit and the models of the ladder are estimated to take, and how they are refused."""

import pytest

from lab.constructions import check_ladder, ladder
from lab.constructions.footprint import estimate_ladder
from lab.machine.allocation import measure_peak, measure_whole_peak
from lab.machine.growth import FORWARD_FRAGMENTS, MANY_TOKENS
from lab.machine.memory import DoesNotFitError
from lab.suite.audit import audit
from lab.suite.footprint import FRAGMENTS, check_audit, estimate_audit
from tasks import TASKS


@pytest.mark.parametrize("name", ["mqar", "flip_flop", "memorize"])
def test_an_audit_of_many_rows_takes_what_few_foretell(name):
    task, rows = TASKS[name](seq_len=64), 1024
    found = estimate_audit(task, rows, tokens=MANY_TOKENS)
    taken = measure_whole_peak(lambda: audit(task, rows=rows))
    foretold = found.growth.count_bytes(found.rows)
    assert foretold == pytest.approx(taken, rel=0.25)
    assert found.total == int(found.fragments * foretold)
    assert found.fragments in (FRAGMENTS, FORWARD_FRAGMENTS)


def test_an_audit_that_memory_does_not_hold_is_refused_in_one_line():
    task = TASKS["flip_flop"](seq_len=2**13)
    check_audit(task, free=2**30)
    words = r"seq_len=8192: does not fit in memory: an audit takes about .* tokens would fit"
    with pytest.raises(DoesNotFitError, match=words):
        check_audit(task, free=2**20)


def test_the_ladder_takes_the_weights_and_the_pass_of_its_largest_model():
    task = TASKS["induction"](seq_len=64, vocab_size=256)
    found = estimate_ladder(task, d_model=16, n_heads=1)
    wide = estimate_ladder(task, d_model=64, n_heads=1)
    assert found.fixed > 4 * 256 * 16
    assert wide.fixed > 4 * found.fixed
    assert wide.total > found.total
    taken = measure_peak(lambda: ladder(task, d_model=64))
    assert wide.growth.count_bytes(wide.rows) + wide.fixed == pytest.approx(taken, rel=0.3)


def test_a_ladder_that_memory_does_not_hold_is_refused_in_one_line():
    task = TASKS["induction"](seq_len=2048, vocab_size=256)
    check_ladder(task, d_model=64, n_heads=1, free=2**31)
    words = r"seq_len=2048: does not fit in memory: a model with weights set by hand takes .* fit"
    with pytest.raises(DoesNotFitError, match=words):
        check_ladder(task, d_model=64, n_heads=1, free=2**24)

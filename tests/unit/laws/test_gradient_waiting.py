"""The law of gradients: what waits for a zero to move holds, what a tie cuts for ever fails."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.laws import reach
from lab.laws.probes import draw
from lab.layers.inner_function import InnerFunctionAttention
from tests.unit.laws.planted_gradients import Planted, judge, rank

WAITING: dict[str, tuple[Callable, dict[str, Tensor], str]] = {
    "low rank": (
        lambda m, h: h + h @ m.a[:, :2] @ m.b,
        {"b": torch.zeros(2, 8)},
        "a (zero) only after b has moved",
    ),
    "gate": (
        lambda m, h: h + m.b * (h @ m.a),
        {"b": torch.zeros(())},
        "a (zero) only after b has moved",
    ),
    "one behind the other": (
        lambda m, h: h * (1 + m.b) + m.b * m.c * (h @ m.a),
        {"b": torch.zeros(8), "c": torch.zeros(8)},
        "a (zero), c (zero) only after b, c have moved",
    ),
    "a branch left out": (
        lambda m, h: h * (1 + m.b) + (h @ m.a if m.b.any() else 0),
        {"b": torch.zeros(8)},
        "a (none) only after b has moved",
    ),
}


@pytest.mark.parametrize(("function", "parameters", "words"), WAITING.values(), ids=WAITING)
def test_what_waits_for_a_zero_to_move_is_no_fault(
    function: Callable, parameters: dict[str, Tensor], words: str
):
    module = Planted(function, a=draw((8, 8), seed=1), **parameters)
    before = {name: p.clone() for name, p in module.double().named_parameters()}
    found = judge(module)
    assert found.verdict == "holds", found
    assert words in found.evidence
    for name, p in module.named_parameters():
        assert torch.equal(p, before[name])
        assert p.grad is None


def test_two_zeros_wait_for_ever():
    zeros = {"a": torch.zeros(8, 2), "b": torch.zeros(2, 8)}
    found = judge(Planted(lambda m, h: h + h @ m.a @ m.b, **zeros))
    assert found.verdict == "fails"
    assert (found.counterexample or "").startswith("a: zero, multiplied by zero in Tensor.matmul")


def test_a_module_that_keeps_its_output_may_wait():
    def keeps(m: Any, h: Tensor) -> Tensor:
        m.kept = m.b * (h @ m.a)
        return h + m.kept

    module = Planted(keeps, a=draw((8, 8), seed=1), b=torch.zeros(()))
    assert judge(module).verdict == "holds"


def choose(m: Any, h: Tensor) -> Tensor:
    """Add the rows of the two highest scores, by choice alone."""
    return h + m.table[(h @ m.keys.T).topk(2).indices].sum(-2)


def mix(m: Any, h: Tensor) -> Tensor:
    """Add them weighted by their scores, which learn so."""
    scores, rows = (h @ m.keys.T).softmax(-1).topk(2)
    return h + (m.table[rows] * scores[..., None]).sum(-2)


def largest(m: Any, h: Tensor) -> Tensor:
    return h + m.table[(0 * h[..., :6]).max(-1).indices]


def first_of_all(m: Any, h: Tensor) -> Tensor:
    return h + m.table[(0 * m.table).argmax() // 8]


@pytest.mark.parametrize(
    ("function", "by"),
    [(rank, "argsort"), (largest, "max"), (first_of_all, "argmax")],
    ids=["argsort", "max", "argmax"],
)
def test_rows_chosen_among_equals_are_tie_only(function: Callable, by: str):
    found = judge(Planted(function, table=draw((6, 8), seed=1)))
    assert found.verdict == "fails"
    code = function.__code__
    line = f"{Path(code.co_filename).name}:{code.co_firstlineno + 1}"
    words = f"table: tie-only, chosen among equals by {by} at {line}"
    assert found.counterexample == words


def test_a_tie_lasts_where_its_keys_do_not_learn():
    table, keys = draw((6, 8), seed=1), torch.zeros(6, 8)
    found = judge(Planted(choose, table=table, keys=keys))
    assert found.verdict == "fails"
    assert "table: tie-only, chosen among equals by topk" in (found.counterexample or "")
    assert "keys: none, cut by Tensor.topk" in (found.counterexample or "")
    found = judge(Planted(mix, table=table, keys=keys))
    assert found.verdict == "holds"
    assert "table (tie-only) only after keys has moved" in found.evidence


def test_rows_chosen_by_content_are_alive():
    tables = {"table": draw((6, 8), seed=1), "keys": draw((6, 8), seed=2)}
    found = judge(Planted(mix, **tables))
    assert found.evidence == "4 of 4 parameters get a gradient at once, lengths 1, 5 in float64"


def test_printed_retrieval_chooses_by_index(unchecked):
    # Erratum I1: keys of zero score alike, and the literal choice never moves them.
    torch.manual_seed(0)
    found = judge(InnerFunctionAttention(8, retrieval="literal", key_init="zeros"))
    assert found.verdict == "fails"
    assert "value_keys: none, cut by Tensor.argsort at inner_f" in (found.counterexample or "")
    assert "value_rows: tie-only, chosen among equals by argsort" in (found.counterexample or "")


def test_the_structure_alone_is_asked_of_reach():
    module = Planted(choose, table=draw((6, 8), seed=1), keys=torch.zeros(6, 8)).double()
    found = reach(module, [draw((2, 5, 8), seed=0)])
    assert found == {name: "none" if name == "keys" else "alive" for name in found}

"""What a model is made of: nothing is counted twice, nothing is left out."""

import pytest
import torch

from analysis.run.anatomy import StackAnatomy, abbreviate
from lab.models import ARCHITECTURES, build
from lab.models.anatomy import dissect
from lab.models.paper_sizes import NOMINAL, SIZES, build_at_paper_size, compare_with_paper


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stack", ["AM*3", "SE*7 IE SE*7 IE", "NM AN", "AM SM", *ARCHITECTURES])
def test_parts_add_up_to_the_model(stack, tied):
    model = build(stack, vocab_size=50, d_model=16, tied=tied)
    found = dissect(model)
    assert found.total == model.parameter_count()
    assert 0 < found.active <= found.total
    assert sum(run.times for run in found.unit) * found.times == len(model.blocks)


def test_what_repeats_is_told_once():
    found = dissect(build("SE*7 IE SE*7 IE SE*7 IE", vocab_size=50, d_model=16))
    assert found.times == 3
    assert [run.times for run in found.unit] == [7, 1]
    assert [run.pair.mixer.name for run in found.unit if run.pair.mixer] == [
        "SSD",
        "InnerFunctionAttention",
    ]


def test_blocks_that_differ_in_an_option_are_not_alike():
    found = dissect(build("AM*2", vocab_size=50, d_model=16, options={"1.M.d_ff": 8}))
    assert [run.times for run in found.unit] == [1, 1]


def test_a_token_uses_some_experts_only():
    model = build("NE", vocab_size=50, d_model=16, options={"E.n_experts": 64, "E.k": 2})
    (run,) = dissect(model).unit
    assert run.pair.transform is not None
    idle = run.pair.transform.parameters - run.pair.transform.active
    n_heads, width = 4, 16
    assert idle == 2 * width * (64 - n_heads * 2)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_totals_are_the_papers_where_it_has_any(name, size):
    with torch.device("meta"):
        model = build_at_paper_size(name, size)
    assert all(parameter.is_meta for parameter in model.parameters())
    compared = compare_with_paper(name, size, dissect(model).total)
    assert compared.parameters == NOMINAL[size]
    assert abs(compared.difference) < 0.005, compared


@pytest.mark.parametrize("stack", ["AM", "NE IN", *ARCHITECTURES])
def test_the_drawing_has_a_box_for_each_part(stack):
    found = StackAnatomy.of(dissect(build(stack, vocab_size=50, d_model=16)))
    shapes = found.figure().to_dict()["layout"]["shapes"]
    boxes = [s for s in shapes if s["type"] == "rect" and "fillcolor" in s]
    layers = [p for run in found.unit for p in (run.pair.mixer, run.pair.transform) if p]
    assert len(boxes) == len(layers) + 2
    assert abbreviate(found.total) in found.says

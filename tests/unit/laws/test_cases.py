"""Every law on every layer, reading, backend and architecture: `tests.cases`.

A normal run leaves out the laws of `COVERED`; `make verify` has them all.
"""

import pytest
import torch

from lab.laws import CONDITIONS, certify, in_double, reach
from lab.laws.probes import draw
from lab.layers.state import Decoder
from tests.case import Case, list_expected
from tests.cases import CASES

COVERED = {
    *("attention 2 heads", "attention one key head", "attention literal mask"),
    *("attention straight-through mask", "attention soft mask", "attention value grouped heads"),
    *("attention value window moved", "ifa softmax all of 3", "ifa sigmoid zero keys"),
    *("ifa straight-through zero keys", "ifa linear", "ifa linear literal", "ifa no position"),
    *("ifa soft mask", "ssd", "ssd one chunk", "ssd groups", "ssd convolution", "ssd wide"),
    *("ssd gated norm", "ssd as printed", "ssd moved", "cdmoe form one score raw"),
    *("cdmoe form two score inside", "peer sigmoid", "peer dense", "routed", "shared experts"),
    *("cheems", "llama", "jamba"),
}
"""Cases whose options other cases have too, in company that is as hard for the laws."""
MARKED = [
    pytest.param(case, id=case.name, marks=[pytest.mark.thorough] if case.name in COVERED else [])
    for case in CASES
]


@pytest.mark.parametrize("case", MARKED)
def test_every_law(case: Case, unchecked):
    # The types' check would be half of the time; `test_types_fit` has it.
    found = certify(
        case.make(),
        d_model=case.d_model,
        lengths=case.lengths,
        conditions=CONDITIONS[:1],
        max_len=2048,
        rounding_len=512,
        # Never reached: what is found must not depend on the machine.
        seconds=60.0,
    )
    outcomes = {v.law: v.verdict for v in found}
    assert outcomes == list_expected(case), "\n".join(map(str, found))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradient_reaches_what_each_reading_lets_it(case: Case):
    x = draw((3, 16, case.d_model), seed=0)
    module, dtype = in_double(case.make(), x)
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    assert reach(module, [x.to(dtype)]) == {name: case.dead.get(name, "alive") for name in trained}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@torch.no_grad()
def test_types_fit(case: Case):
    module, x = case.make(), draw((2, 5, case.d_model), seed=0).float()
    assert module(x).dtype == torch.float32
    if isinstance(module, Decoder):
        keep = torch.ones(2, 5, dtype=torch.bool)
        keep[0, :2] = False
        _, state = module.prefill(x, module.start(2, 3), keep)
        y, state = module.step(x[:, 0], state)
        assert y.dtype == torch.float32
        assert state.position.tolist() == [7, 9]


def test_names_are_told_apart():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert set(names) > COVERED

"""The instrument, calibrated: every planted fault is found, no right module is called wrong."""

import pytest
import torch

from lab.bench.calibration import FAULTS, RIGHT, Fault, Right
from lab.laws import LAWS, QUICK, Budget, Examination

BUDGET = Budget(max_len=2048, rounding_len=256, compiler="aot_eager")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_found(fault: Fault, unchecked):
    torch.manual_seed(0)
    found = Examination(fault.build(), budget=BUDGET).verdict(fault.law)
    assert found.verdict == "fails", found
    assert found.counterexample
    assert found.snippet


@pytest.mark.parametrize("right", RIGHT, ids=lambda right: right.name)
def test_no_right_module_is_called_wrong(right: Right, unchecked):
    torch.manual_seed(0)
    found = list(Examination(right.build(), lengths=LENGTHS, budget=QUICK))
    assert not [verdict for verdict in found if verdict.verdict == "fails"]
    # A law that raised would stay silent as well.
    assert not [verdict for verdict in found if "raised" in verdict.evidence]
    assert {verdict.law for verdict in found if verdict.verdict == "holds"} >= DECIDED


@pytest.mark.parametrize("law", ["causal", "batch-invariant", "prefill = step"])
@pytest.mark.parametrize("name", ["bf16 inside", "fp16 scores"])
def test_half_precision_inside_is_no_other_fault(name: str, law: str, unchecked):
    torch.manual_seed(0)
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    found = Examination(fault.build(), lengths=(3, 17, 64), budget=BUDGET).verdict(law)
    assert found.verdict == ("not applicable" if law.startswith("prefill") else "holds"), found


LENGTHS = (1, 8, 16, 40)
DECIDED = {"deterministic", "causal", "batch-invariant"}


def test_faults_are_distinct():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30
    assert {fault.law for fault in FAULTS} == set(LAWS)

"""`certify` finds every planted fault and calls no right module wrong.

A normal run tries about thirty of the modules: the first and the last planted fault of each law,
and `FAMILIES`, a right module of each family. `make verify` tries all of them, which are marked
`thorough`; `lab bench --only certify` counts all of them.
"""

from dataclasses import replace

import pytest
import torch

from lab.bench.calibration import FAULTS, RIGHT, Fault, Right
from lab.laws import LAWS, QUICK, Certification, CertifySettings

SETTINGS = CertifySettings(max_len=2048, rounding_len=256, compiler="aot_eager")
LENGTHS = (1, 8, 16, 40)
DECIDED = {"deterministic", "causal", "batch-invariant"}
FAMILIES = (
    *("attention", "cached attention", "retention", "state space", "convolution"),
    *("experts", "GRU", "running mean", "dropout", "zero projection", "language model"),
)


def mark_thorough(modules: tuple, few: set[str]) -> list:
    return [
        pytest.param(one, id=one.name, marks=() if one.name in few else (pytest.mark.thorough,))
        for one in modules
    ]


def choose_faults() -> set[str]:
    by_law = [[fault.name for fault in FAULTS if fault.law == law] for law in LAWS]
    return {name for names in by_law for name in (names[0], names[-1])}


@pytest.mark.parametrize("fault", mark_thorough(FAULTS, choose_faults()))
def test_every_fault_is_found(fault: Fault, unchecked):
    torch.manual_seed(0)
    found = Certification(fault.build(), SETTINGS).judge(fault.law)
    assert found.verdict == "fails", found
    assert found.counterexample
    assert found.snippet


@pytest.mark.parametrize("right", mark_thorough(RIGHT, set(FAMILIES)))
def test_no_right_module_is_called_wrong(right: Right, unchecked):
    torch.manual_seed(0)
    found = list(Certification(right.build(), replace(QUICK, lengths=LENGTHS)))
    assert not [verdict for verdict in found if verdict.verdict == "fails"]
    # A law that raises is not decided, and so would not fail either.
    assert not [verdict for verdict in found if "raised" in verdict.evidence]
    assert {verdict.law for verdict in found if verdict.verdict == "holds"} >= DECIDED


@pytest.mark.parametrize("law", ["causal", "batch-invariant", "prefill = step"])
@pytest.mark.parametrize("name", ["bf16 inside", "fp16 scores"])
def test_half_precision_inside_is_no_other_fault(name: str, law: str, unchecked):
    torch.manual_seed(0)
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    settings = replace(SETTINGS, lengths=(3, 17, 64))
    found = Certification(fault.build(), settings).judge(law)
    assert found.verdict == ("not applicable" if law.startswith("prefill") else "holds"), found


def test_modules_are_distinct_and_every_law_has_two_faults():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 100
    assert {right.name for right in RIGHT} >= set(FAMILIES)
    assert len({right.name for right in RIGHT}) == len(RIGHT)
    for law in LAWS:
        assert len([fault for fault in FAULTS if fault.law == law]) >= 2, law

"""`certify` finds every planted fault, blames no unrelated law, and calls no right module wrong.

A normal run tries about thirty of the modules: the first and the last planted fault of each law,
and `FAMILIES`, a right module of each family. `make verify` tries the others, marked `thorough`.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
import torch
from torch import nn

from lab.laws import LAWS, QUICK, Certification, CertifySettings
from tests.planted import FAULTS, RIGHT, Fault, Right

SETTINGS = CertifySettings(max_len=2048, rounding_len=256, compiler="aot_eager")
LENGTHS = (1, 8, 16, 40)
DECIDED = {"deterministic", "causal", "batch-invariant"}
FAMILIES = (
    *("attention", "cached attention", "retention", "state space", "convolution"),
    *(
        "experts",
        "GRU",
        "running mean",
        "slow average",
        "dropout",
        "zero projection",
        "language model",
    ),
)


def mark_thorough(modules: tuple, few: set[str]) -> list:
    return [
        pytest.param(one, id=one.name, marks=() if one.name in few else (pytest.mark.thorough,))
        for one in modules
    ]


def name_class(build: Callable[[], nn.Module]) -> str:
    return f"{build.__module__}:{build.__qualname__}"


def find_mended(fault: Fault) -> type[nn.Module] | None:
    """Return the right module of which a fault replaces a method; None if it stands alone."""
    assert isinstance(fault.build, type)
    base = fault.build.__mro__[1]
    return base if base.__module__.startswith("tests.planted") else None


def replace_class(program: str, old: Callable[[], nn.Module], new: type[nn.Module]) -> str:
    imports = "from {0.__module__} import {0.__qualname__} as factory"
    assert imports.format(old) in program
    return program.replace(imports.format(old), imports.format(new))


class Interpreter:
    """An isolated interpreter that runs programs one after another, each with its own names."""

    SERVES = """
import json, sys, traceback
sys.path.insert(0, sys.argv[1])
answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    try:
        exec(json.loads(line), {"__name__": "__main__"})
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except Exception:
        traceback.print_exc()
        code = 2
    print(code, file=answers, flush=True)
"""

    def __init__(self, folder: Path):
        command = [sys.executable, "-I", "-c", self.SERVES, str(folder)]
        self.process = Popen(command, stdin=PIPE, stdout=PIPE, text=True)

    def run(self, program: str) -> int:
        """Return the code with which a program ends."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(program), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def interpreter():
    served = Interpreter(Path(__file__).parents[3])
    with served.process:
        yield served
        served.process.kill()


def choose_faults() -> set[str]:
    by_law = [[fault.name for fault in FAULTS if fault.law == law] for law in LAWS]
    return {name for names in by_law for name in (names[0], names[-1])}


@pytest.mark.parametrize("fault", mark_thorough(FAULTS, choose_faults()))
def test_every_fault_is_found_and_shown(fault: Fault, interpreter: Interpreter, unchecked):
    found = Certification(name_class(fault.build), SETTINGS).judge(fault.law)
    assert found.verdict == "fails", found
    assert found.counterexample
    assert found.snippet
    assert "lab.laws" not in found.snippet
    assert interpreter.run(found.snippet) == 1
    mended = find_mended(fault)
    if mended is not None:
        # 2: it names a parameter that only the faulty module has.
        shown = interpreter.run(replace_class(found.snippet, fault.build, mended))
        assert shown == 0 or (shown == 2 and fault.law in ("gradient reach", "table reach"))


@pytest.mark.parametrize("fault", mark_thorough(FAULTS, set()))
def test_no_fault_fails_an_unrelated_law(fault: Fault, unchecked):
    torch.manual_seed(0)
    found = list(Certification(fault.build(), replace(QUICK, lengths=LENGTHS)))
    failing = {verdict.law for verdict in found if verdict.verdict == "fails"}
    assert failing <= {fault.law, *fault.also}


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

"""How long `lab certify` keeps a user waiting, what it finds, and what it wrongly calls a fault."""

import subprocess
import sys
import time

import torch

from lab.bench.calibration import FAULTS, RIGHT, Fault, Right
from lab.bench.ratio import Ratio
from lab.laws import LAWS, QUICK, Budget, Examination

TARGETS = {
    "a GRU of 16": "torch.nn:GRU --option input_size=16 --option hidden_size=16",
    "attention of 64": "lab.layers.attention:Attention --option d_model=64 --option n_heads=2",
    "SSD of 64": "lab.layers.ssd:SSD --option d_model=64 --option n_heads=2",
}
BOUND_S, QUICK_BOUND_S = 20.0, 5.0
WHOLE = Budget(max_len=2048, rounding_len=256, compiler="aot_eager")


def certify() -> list[Ratio]:
    """Time certificates against their bounds, and count faults found and right modules spared."""
    return [
        *(_timed(target, words, "", BOUND_S) for words, target in TARGETS.items()),
        *(_timed(target, words, "--quick", QUICK_BOUND_S) for words, target in TARGETS.items()),
        _share("planted faults found", [_found(fault, WHOLE) for fault in FAULTS]),
        _share("planted faults found by --quick", [_found(fault, QUICK) for fault in FAULTS], None),
        _share("planted faults beside which no other law fails", [_alone(f) for f in FAULTS]),
        _share("right modules that no law calls wrong", [_spared(right) for right in RIGHT]),
    ]


def _timed(target: str, words: str, mode: str, bound: float) -> Ratio:
    command = [sys.executable, "-m", "lab.cli", "certify", *target.split(), *mode.split()]
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    taken = time.perf_counter() - began
    name = " ".join(filter(None, ("lab certify", mode, words)))
    return Ratio(f"{name}, against its bound", taken, bound, "s", bound / taken, 1.0)


def _share(words: str, found: list[str], promised: float | None = 1.0) -> Ratio:
    """Return a share as a ratio, and the names of what is missing."""
    missing = [name for name in found if name]
    share = 1 - len(missing) / len(found)
    note = f"not: {', '.join(missing)}" if missing else ""
    return Ratio(words, len(found) - len(missing), len(found), "modules", share, promised, note)


def _found(fault: Fault, budget: Budget) -> str:
    """Return nothing, or the name of a fault whose law does not fail."""
    torch.manual_seed(0)
    found = Examination(fault.build(), budget=budget).verdict(fault.law)
    return "" if found.verdict == "fails" else fault.name


def _alone(fault: Fault) -> str:
    """Return nothing, or the name of a fault and the laws that fail although they are kept."""
    torch.manual_seed(0)
    examined = Examination(fault.build(), budget=QUICK)
    others = [law for law in LAWS if law not in (fault.law, *fault.also)]
    failing = [law for law in others if examined.verdict(law).verdict == "fails"]
    return f"{fault.name} ({', '.join(failing)})" if failing else ""


def _spared(right: Right) -> str:
    """Return nothing, or the name of a right module and the laws that fail on it."""
    torch.manual_seed(0)
    failing = [v.law for v in Examination(right.build(), budget=WHOLE) if v.verdict == "fails"]
    return f"{right.name} ({', '.join(failing)})" if failing else ""

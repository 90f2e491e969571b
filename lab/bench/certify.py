"""How long `lab certify` takes, how many planted faults it finds, and how many false alarms."""

import subprocess
import sys
import time
from dataclasses import replace

import torch

from lab.bench.calibration import FAULTS, RIGHT, Fault, Right
from lab.bench.ratio import Ratio
from lab.certify_settings import QUICK, CertifySettings
from lab.laws import LAWS, Certification

TARGETS = {
    "a GRU of 16": "torch.nn:GRU --option input_size=16 --option hidden_size=16",
    "attention of 64": "lab.layers.attention:Attention --option d_model=64 --option n_heads=2",
    "SSD of 64": "lab.layers.ssd:SSD --option d_model=64 --option n_heads=2",
}
BOUND_S, QUICK_BOUND_S = 20.0, 5.0
WHOLE = CertifySettings(max_len=2048, rounding_len=256, compiler="aot_eager")
QUICK_AT_ALL_LENGTHS = replace(QUICK, lengths=None)


def measure() -> list[Ratio]:
    """Time certificates against their bounds, and count faults found and false alarms."""
    return [
        *(_time(target, words, "", BOUND_S) for words, target in TARGETS.items()),
        *(_time(target, words, "--quick", QUICK_BOUND_S) for words, target in TARGETS.items()),
        _count("planted faults found", [_miss(fault, WHOLE) for fault in FAULTS]),
        _count(
            "planted faults found by --quick",
            [_miss(fault, QUICK_AT_ALL_LENGTHS) for fault in FAULTS],
            None,
        ),
        _count(
            "planted faults beside which no other law fails",
            [_find_other_failures(fault) for fault in FAULTS],
        ),
        _count(
            "right modules that no law calls wrong", [_find_false_alarms(right) for right in RIGHT]
        ),
    ]


def _time(target: str, words: str, mode: str, bound: float) -> Ratio:
    command = [sys.executable, "-m", "lab", "certify", *target.split(), *mode.split()]
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    taken = time.perf_counter() - began
    name = " ".join(filter(None, ("lab certify", mode, words)))
    return Ratio.of_costs(f"{name}, against its bound", taken, bound, "s", 1.0)


def _count(words: str, complaints: list[str], promised: float | None = 1.0) -> Ratio:
    """Return the share of modules without a complaint as a ratio; its note lists complaints."""
    found = [complaint for complaint in complaints if complaint]
    right, total = len(complaints) - len(found), len(complaints)
    note = f"not: {', '.join(found)}" if found else ""
    return Ratio(words, right, total, "modules", 1 - len(found) / total, promised, note)


def _miss(fault: Fault, settings: CertifySettings) -> str:
    """Return the name of a fault whose law does not fail; empty if it does."""
    torch.manual_seed(0)
    found = Certification(fault.build(), settings).judge(fault.law)
    return "" if found.verdict == "fails" else fault.name


def _find_other_failures(fault: Fault) -> str:
    """Return the name of a fault and the laws that fail although it obeys them, or nothing."""
    torch.manual_seed(0)
    certification = Certification(fault.build(), QUICK_AT_ALL_LENGTHS)
    others = [law for law in LAWS if law not in (fault.law, *fault.also)]
    failing = [law for law in others if certification.judge(law).verdict == "fails"]
    return f"{fault.name} ({', '.join(failing)})" if failing else ""


def _find_false_alarms(right: Right) -> str:
    """Return the name of a right module and the laws that fail on it, or nothing."""
    torch.manual_seed(0)
    failing = [v.law for v in Certification(right.build(), WHOLE) if v.verdict == "fails"]
    return f"{right.name} ({', '.join(failing)})" if failing else ""

"""How long `lab analyze` takes at the length of the paper's setting."""

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lab.bench.ratio import Ratio

BOUND_S = 120.0
RUN = "mqar --seq-len 2048 --d-model 64 --max-steps 8 --batch-size 2 --test-rows 4"
STACKS = {
    "AM*2": "attention",
    "SM AM": "SSD below attention",
    "SE IE --option I.mask=soft": "SSD, inner functions, a mask, CDMoE",
}


def measure() -> list[Ratio]:
    """Time every analysis of a run, process and all, against the promised two minutes.

    The weights are hardly trained. Analyses cost the same as on a trained model, except that fewer
    placebos are drawn where there is no accuracy to lose.
    """
    return [_time(options, words) for options, words in STACKS.items()]


def _time(options: str, words: str) -> Ratio:
    stack, *rest = options.split(" --option ")
    chosen = [part for option in rest for part in ("--option", option)]
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        _lab(*RUN.split(), "--stack", stack, *chosen, "--out", run)
        began = time.perf_counter()
        _lab("analyze", run)
        taken = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    name = f"lab analyze, T = 2048, d 64, {words}, against its bound"
    note = f"at most {peak:,.0f} MiB so far, the interpreter's own among them"
    return Ratio.of_costs(name, taken, BOUND_S, "s", 1.0, note)


def _lab(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "lab", *words], check=True, capture_output=True)

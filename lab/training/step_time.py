"""Measuring how long a training step takes on this machine in each precision; results are cached.

A processor's flags do not tell whether bf16 is faster: some that advertise bf16 products run them
at half the speed of fp32 (LOG.md has both kinds). So a run times its own step in each precision.
"""

import hashlib
import json
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import torch

from lab.files import write
from lab.lengthening import Stage
from lab.models.evaluation import score
from lab.models.language_model import LanguageModel
from lab.ops.cross_entropy import linear_cross_entropy
from lab.training.runs import Run
from tasks.base import Batch

SECONDS = 1.0
"""About how long to measure; every case is measured at least once."""
WORTHWHILE = 0.97
"""bf16 is chosen if its steps take at most this share of the time of fp32, which is exact."""


@dataclass(frozen=True)
class StepTime:
    """The measured time of a training step, without its optimizer.

    Attributes:
        precision: "fp32" or "bf16".
        first: seconds of a step in the first, shortest stage.
        last: seconds of a step at the task's own row length.
    """

    precision: str
    first: float
    last: float

    @property
    def plausible(self) -> bool:
        """Whether these values can come from a measurement."""
        times = (self.first, self.last)
        return self.precision in ("fp32", "bf16") and all(0 < t < math.inf for t in times)


def measure(run: Run, parts: Sequence[Stage], device: torch.device, precision: str) -> StepTime:
    """Return how long a run's steps take in a precision; "auto" is the faster one.

    The measurement is cached in the user's cache folder, by processor, torch, threads and run.

    Args:
        run: the run; its model is built again to be timed.
        parts: the stages of training.
        device: where to compute.
        precision: "fp32", "bf16" or "auto".
    """
    memory = get_cache_file()
    key = _digest_setting(run, parts, device, precision)
    known = _read_times(memory)
    if key in known:
        return StepTime(**known[key])
    choices = list_precisions(device) if precision == "auto" else (precision,)
    found = find_fastest(run.build().to(device), [parts[0], parts[-1]], choices)
    known[key] = vars(found)
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        write(memory, json.dumps(known, indent=1))
    except OSError:
        pass  # Without a cache the next start measures again, for a second.
    return found


def get_cache_file() -> Path:
    """Return the file of the cached times."""
    return Path(platformdirs.user_cache_dir("wonderful-lab")) / "step_time.json"


def find_fastest(model: LanguageModel, parts: Sequence[Stage], choices: Sequence[str]) -> StepTime:
    """Time the steps of two stages in each precision, and return those of the best precision.

    A time is that of the fastest step. The model's weights stay as they are.
    """
    device = next(model.parameters()).device
    batches = [part.task.batch(size=part.batch_size, device=device) for part in parts]
    best = {precision: [float("inf")] * len(parts) for precision in choices}
    began, rounds = time.perf_counter(), 0
    # The first round warms up: it allocates memory, chooses kernels and fills caches.
    while rounds < 2 or time.perf_counter() - began < SECONDS:
        for precision, times in best.items():
            for i, batch in enumerate(batches):
                seconds = _time_step(model, batch, precision)
                times[i] = min(times[i], seconds) if rounds else float("inf")
        rounds += 1
    found = [StepTime(precision, *times) for precision, times in best.items()]
    if len(found) == 1:
        return found[0]
    exact, half = found
    pays = half.first + half.last <= WORTHWHILE * (exact.first + exact.last)
    return half if pays else exact


def list_precisions(device: torch.device) -> tuple[str, ...]:
    """Return the precisions in which the device can multiply, "fp32" first."""
    if device.type == "cuda":
        has = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return ("fp32", "bf16") if has else ("fp32",)


def _time_step(model: LanguageModel, batch: Batch, precision: str) -> float:
    """Return the seconds of a forward and backward pass."""
    began = time.perf_counter()
    with torch.random.fork_rng():
        hidden, weight, targets = score(model, batch, precision)
        loss, _ = linear_cross_entropy(hidden, weight, targets)
        loss.backward()
    model.zero_grad(set_to_none=True)
    loss.item()  # waits for a GPU
    return time.perf_counter() - began


def _digest_setting(run: Run, parts: Sequence[Stage], device: torch.device, precision: str) -> str:
    """Return a digest of everything that a step's time depends on."""
    processor = (
        _describe_processor() if device.type == "cpu" else torch.cuda.get_device_name(device)
    )
    sizes = [(part.task.describe(), part.batch_size) for part in (parts[0], parts[-1])]
    threads, model = torch.get_num_threads(), run.model.to_dict()
    facts = [processor, torch.__version__, threads, precision, sizes, model]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _describe_processor() -> str:
    """Return the processor's name and its bf16 features, which one name may differ in."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return name
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    features = [word for line in lines if line.startswith("flags") for word in line.split()]
    kinds = sorted({word for word in features if "bf16" in word or word.startswith("amx")})
    return " ".join([names[0] if names else name, *kinds])


def _read_times(file: Path) -> dict[str, dict]:
    """Return the cached times; none if the file cannot be read."""
    try:
        known = json.loads(file.read_text())
        found = {
            key: StepTime(str(t["precision"]), float(t["first"]), float(t["last"]))
            for key, t in known.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return {key: vars(times) for key, times in found.items() if times.plausible}

"""A small run with every file that a run folder may have, made once and copied for each case."""

import functools
import shutil
import tempfile
from pathlib import Path

from lab.config import ModelConfig, Runtime, TrainConfig
from lab.training.experiment import carry_out
from lab.training.run import Run
from tasks import TASKS

STEPS = 6


def describe(path: Path, **train: object) -> Run:
    """Describe a run of a few steps."""
    values = {
        "batch_size": 4,
        "max_steps": STEPS,
        "eval_every": 2,
        "test_rows": 8,
        "precision": "fp32",
        **train,
    }
    model = ModelConfig(stack="AM", d_model=16, options={"A.mask": "none"})
    task = TASKS["mqar"](seq_len=16, vocab_size=32)
    return Run(path, task, model, TrainConfig(**values))


@functools.cache
def make() -> Path:
    """Train the run, and analyse it."""
    from analysis.base import Subject
    from analysis.examination import examine
    from analysis.pages.report import write_both

    run = describe(Path(tempfile.mkdtemp(prefix="faults-")) / "run")
    carry_out(run, Runtime(device="cpu", checkpoint_every=2, threads=1))
    write_both(run, examine(Subject.of(run, rows=4), ["tokens"]))
    return run.path


def copy(folder: Path) -> Path:
    """Copy the run into a folder, and return where it is."""
    return Path(shutil.copytree(make(), folder / "run", dirs_exist_ok=True))


def take_stock(folder: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder."""
    return {str(file): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}

"""Constants that say for how many seconds a run measures its choices: zero in tests."""

from importlib import import_module

MEASURED = (
    "lab.training.step_time.SECONDS",
    "lab.training.lane_time.SECONDS",
    "lab.training.lane_time.QUICK",
    "lab.machine.processor.INTERVAL",
)


def behave_as_in_tests() -> None:
    """Let this process, which pytest did not set up, measure briefly and poison its memory."""
    import torch

    for path in MEASURED:
        module, _, name = path.rpartition(".")
        setattr(import_module(module), name, 0.0)
    torch.use_deterministic_algorithms(True)

"""What a sweep on the CPU ends with whatever has happened to its processes."""

from pathlib import Path

from lab.training.runs import Run


def read_ends(out: Path) -> dict[str, tuple[bytes, list[float], bytes]]:
    """Return the last weights, losses and accuracies of each run of a sweep."""
    ends = {}
    for path in sorted(out.glob("*/run")):
        run = Run.open(path)
        (home,) = run.list_checkpoints().values()
        losses = [row["loss"] for row in run.read_metrics()]
        lengths = (path.parent / "lengths.json").read_bytes()
        ends[path.parent.name] = (home / "model.safetensors").read_bytes(), losses, lengths
    return ends

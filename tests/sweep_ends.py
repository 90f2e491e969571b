"""What a sweep on the CPU ends with whatever has happened to its processes."""

from pathlib import Path

from lab.training.run import Run


def read_ends(out: Path) -> dict[str, tuple[bytes, list[float], float]]:
    """Return the last weights, losses and accuracy of each run of a sweep."""
    ends = {}
    for path in sorted(file.parent for file in out.glob("*/config.json")):
        run = Run.open(path)
        (home,) = run.list_checkpoints().values()
        losses = [row["loss"] for row in run.read_metrics()]
        result = run.read_final_result()
        assert result is not None
        ends[path.name] = (home / "model.safetensors").read_bytes(), losses, result["accuracy"]
    return ends

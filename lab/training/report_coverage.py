"""What the report in a run folder covers, read without importing any analysis."""

from pathlib import Path

from lab.folder import Folder

NUMBERS, PAGE = "analysis.json", "report.html"
"""The report of the newest weights: its numbers and its page."""


def read_coverage(run: Path, step: int) -> set[str] | None:
    """Return the analyses that a report has, or that do not apply; None without a report.

    Args:
        run: the run folder.
        step: of the weights that the report must be of.

    Raises:
        RunError: when the report's numbers cannot be read.
    """
    folder = Folder(run)
    if not folder.exists(NUMBERS):
        return None
    advice = "move it away to begin a new one"
    numbers = folder.read_json(NUMBERS, f"{run / NUMBERS} cannot be read; {advice}")
    if numbers.get("step") != step:
        return None
    return {*numbers.get("analyses", ()), *numbers.get("not_applicable", ())}

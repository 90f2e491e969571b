"""Opening a run, and its result in words: its scores, and how and why it ended.

Nothing here imports torch, so that what has ended is shown at once.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lab.training.records import find_ending, name_ending
from lab.training.run import Run
from tasks import TASKS


def open_run(path: Path, trust: bool, on_note: Callable[[str], object]) -> Run:
    """Return a run; note if its own mixer's code is no longer that of its training.

    Raises:
        RunError: for a folder that holds no run, or one that needs trust.
    """
    run = Run.open(path, trust=trust)
    change = run.describe_change()
    if change:
        on_note(f"{path}: {change}; its weights are now used in other code")
    return run


def list_scores(result: Mapping[str, Any]) -> list[tuple[str, float | None]]:
    """Return the accuracies of model, construction, oracle, shortcuts and chance, best first."""
    scores = {"this model": result["accuracy"], **result["baselines"]}
    by_hand = result.get("set_by_hand") or {}
    if by_hand.get("accuracy") is not None:
        scores["this model, set by hand"] = by_hand["accuracy"]
    return sorted(scores.items(), key=lambda score: -(score[1] or 0.0))


def name_measure(result: Mapping[str, Any]) -> str:
    """Return what the accuracies of a result are called, by its task."""
    task = result["task"]
    return TASKS[task].measure if task in TASKS else "accuracy"


def format_accuracy(value: float | None) -> str:
    """Return an accuracy with four decimals; — for none."""
    return "—" if value is None else f"{value:.4f}"


def describe_ending(result: dict[str, Any]) -> str:
    """Describe how a run ended, what its construction reaches, and why it is not solved."""
    steps = f"{result['steps']:,} steps" if result["steps"] != 1 else "1 step"
    ending = name_ending(find_ending(result))
    line = (
        f"{ending} after {steps}, {result['rows']:,} rows, "
        f"{format_duration(result['seconds'])} of training "
        f"({result['rows_per_second'] or 0:,.0f} rows/s)"
    )
    stages = result.get("stages", [])
    if stages and stages[-1]["seq_len"] < result["seq_len"]:
        line += (
            f"\ntraining did not get past rows of {stages[-1]['seq_len']:,} tokens to the "
            f"{result['seq_len']:,} asked for"
        )
        if result["stopped"] == "budget":
            line += " (limits: --max-steps, and --stage-steps without --unlearned lengthen)"
    if len(stages) > 1:
        grown = ", ".join(f"{stage['steps']:,} at {stage['seq_len']:,}" for stage in stages)
        line += f"\nsteps at each row length: {grown} tokens"
    why = result.get("diagnosis")
    by_hand = result.get("set_by_hand")
    # A solved run shows that weights can solve the task; the diagnosis "cannot" that none can.
    decided = result["stopped"] == "solved" or (why is not None and why["kind"] == "cannot")
    if by_hand is not None and by_hand["verdict"] != "solves" and not decided:
        line += f"\nweights set by hand, {by_hand['verdict']}: {by_hand['because']}"
    if why is not None:
        stage = f"at rows of {why['seq_len']:,} tokens"
        because = why["because"][:1].upper() + why["because"][1:]
        line += f"\nwhy it is not solved, {stage}: {why['kind']}. {because}"
    return line


def format_duration(seconds: float) -> str:
    """Return a length of time in the two units that matter: "3 d 4 h", "2 min 5 s"."""
    units = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    if seconds < 1:
        return f"{seconds:.1f} s"
    for i, (name, size) in enumerate(units[:-1]):
        if seconds >= size:
            finer, unit = units[i + 1]
            rest = f" {seconds % size // unit:.0f} {finer}"
            return f"{seconds // size:.0f} {name}{rest if rest[1] != '0' else ''}"
    return f"{seconds:.0f} s"

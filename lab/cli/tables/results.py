"""The result of a run: accuracy and baselines, other settings, and why it ended."""

from typing import Any

from rich.table import Table

from lab.cli.tables.durations import format_duration
from lab.config import AUDIT_ROWS
from lab.training.records import find_ending, name_ending


def build_result_table(result: dict[str, Any]) -> Table:
    """Return a table of the accuracies of model, construction, oracle, shortcuts and chance."""
    scores = {"this model": result["accuracy"], **result["baselines"]}
    by_hand = result.get("set_by_hand") or {}
    if by_hand.get("accuracy") is not None:
        scores["this model, set by hand"] = by_hand["accuracy"]
    table = Table(
        title=f"{result['task']}: test accuracy",
        title_justify="left",
        caption=f"chance, shortcuts and oracle: on the first {AUDIT_ROWS} test rows",
    )
    table.add_column("")
    table.add_column("accuracy", justify="right")
    for name, value in sorted(scores.items(), key=lambda score: -(score[1] or 0.0)):
        style = "bold" if name == "this model" else ""
        table.add_row(name, "—" if value is None else f"{value:.4f}", style=style)
    return table


def build_evaluations_table(found: list[dict[str, Any]]) -> Table:
    """Return a table of the accuracy in other settings, each with its 95 % interval."""
    table = Table(title="beyond training: test accuracy", title_justify="left")
    for name in ("", "accuracy", "95 %", "chance", "rows"):
        table.add_column(name, justify="left" if not name else "right")
    for entry in found:
        where = f"{entry['option']}={entry['value']}"
        if "error" in entry:
            table.add_row(where, entry["error"])
            continue
        low, high = entry["interval"]
        table.add_row(
            where,
            f"{entry['accuracy']:.4f}",
            f"{low:.4f} … {high:.4f}",
            f"{entry['chance']:.4f}",
            f"{entry['rows']:,}",
        )
    return table


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

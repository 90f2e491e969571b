"""The history of the records: a table in Markdown, and a figure of a track."""

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import plotly.graph_objects as go

from analysis.plots.style import BLUE, MUTED, VERMILLION, new_figure
from analysis.records.entry import Entry, RecordTrial, read_history
from analysis.records.judgement import find_median
from analysis.records.track import TRACKS, WORDS, Measure, Track
from lab.files import RunError, explain_write_errors, write

PAGE = "records.md"
"""The page in docs/ with the table."""
BEGIN, END = "<!-- table of records: begin -->", "<!-- table of records: end -->"
HEIGHT = 360
APART = 0.16
"""Distance between an entry and the rerun of the one before, in entries."""


def read_histories(home: Path) -> dict[str, list[Entry]]:
    """Return the entries of every track by its name, the first one first.

    Raises:
        RunError: for a file that is not an entry.
    """
    return {name: read_history(home, track) for name, track in TRACKS.items()}


def format_median(trials: Sequence[RecordTrial], measure: Measure) -> str:
    """Return the median of what is counted, with its 95 % interval."""
    median, ends = find_median(trials, measure)
    low, high = (f"{end:,.0f}" if math.isfinite(end) else "unknown" for end in ends)
    return f"{median:,.0f} ({low} … {high})"


def build_table(histories: Mapping[str, Sequence[Entry]]) -> str:
    """Return the table of all tracks and entries in Markdown, the newest entry first."""
    lines = [
        "| Track | Entry | Median (95 %) | Solved | p | Date |",
        "|---|---|---|---|---|---|",
    ]
    for name, entries in histories.items():
        if not entries:
            lines.append(f"| {name} | none yet | | | | |")
        for entry in reversed(entries):
            lines.append(f"| {' | '.join(list_cells(entry, TRACKS[name]))} |")
    return "\n".join(lines)


def list_cells(entry: Entry, track: Track) -> tuple[str, ...]:
    """Return what a table says of an entry: track, entry, median, solved, p, date."""
    solved = sum(trial.solved for trial in entry.trials)
    return (
        track.name,
        f"{entry.number}. {entry.candidate.name}",
        format_median(entry.trials, track.measure),
        f"{solved} of {len(entry.trials)}",
        "" if entry.p is None else f"{entry.p:.2g}",
        entry.date[:10],
    )


def update_page(page: Path, table: str) -> None:
    """Put the table between the marks of a page.

    Raises:
        RunError: for a page without the marks, or that cannot be read or written.
    """
    with explain_write_errors(page):
        text = page.read_text(encoding="utf-8")
        before, begin, rest = text.partition(BEGIN)
        _, end, after = rest.partition(END)
        if not (begin and end):
            raise RunError(f"{page}: must have the lines {BEGIN} and {END}")
        write(page, f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")


def draw(entries: Sequence[Entry], track: Track) -> go.Figure:
    """Draw the runs of each entry and their median; triangles are runs that were not solved.

    On tracks of CPU seconds, the rerun of the entry before is beside each entry: only the two are
    of one machine.
    """
    fig = new_figure(height=HEIGHT)
    reruns = [(n - APART, e.rerun) for n, e in enumerate(entries) if e.rerun is not None]
    groups = [(float(n), e.trials) for n, e in enumerate(entries)]
    for places, color, name in ((reruns, MUTED, "the one before, rerun"), (groups, BLUE, "a run")):
        for solved, symbol, ending in (
            (True, "circle-open", "solved"),
            (False, "triangle-up-open", "not solved by then"),
        ):
            at = [
                (x, trial.count(track.measure))
                for x, trials in places
                for trial in trials
                if trial.solved is solved
            ]
            if at:
                fig.add_scatter(
                    x=[x for x, _ in at],
                    y=[count for _, count in at],
                    mode="markers",
                    marker={"symbol": symbol, "color": color, "size": 7},
                    name=f"{name}, {ending}",
                    hovertemplate=f"{name}, {ending}: %{{y:,.0f}}<extra></extra>",
                )
    medians = [find_median(trials, track.measure)[0] for _, trials in groups]
    fig.add_scatter(
        x=[x for x, _ in groups],
        y=medians,
        mode="lines+markers",
        line={"color": VERMILLION, "width": 1.5, "dash": "dot" if reruns else "solid"},
        marker={"symbol": "diamond", "size": 9},
        name="median of a record",
        hovertemplate="median %{y:,.0f}<extra></extra>",
    )
    fig.update_xaxes(
        tickvals=list(range(len(entries))),
        ticktext=[f"{html.escape(e.candidate.name)}<br>{e.date[:10]}" for e in entries],
        range=[-0.5, len(entries) - 0.5],
    )
    fig.update_yaxes(
        title={"text": WORDS[track.measure], "standoff": 12},
        automargin=True,
        tickformat=",",
        rangemode="tozero",
    )
    return fig.update_layout(margin_t=100)

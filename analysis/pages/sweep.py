"""The page of a sweep: how its runs ended, a table of settings, and the figures that apply."""

from pathlib import Path

import plotly.graph_objects as go

from analysis.pages.page import Shown, fill_template, show_figure
from analysis.plots.style import add_title
from analysis.sweeps.results import SweepResults
from analysis.words import count_decimals
from lab.files import explain_write_errors, write


def render(results: SweepResults, name: str, question: str = "") -> str:
    """Return the page as HTML; all text from users is escaped."""
    shares = [share for s in results.settings for share in (*s.accuracies, *s.interval)]
    return fill_template(
        "sweep.html.j2",
        title=question or name,
        results=results,
        figures=show_figures(results, name),
        decimals=count_decimals(share for share in shares if share == share),
    )


def show_figures(results: SweepResults, name: str) -> list[tuple[str, Shown]]:
    """Return every figure of a sweep with its words, each after its identifier."""
    return [
        (f"{key}-{i}", show_figure(finding.describe(), finding.draw(), name))
        for key, findings in results.findings.items()
        for i, finding in enumerate(findings, 1)
    ]


def write_page(results: SweepResults, name: str, question: str, path: Path) -> None:
    """Write the page.

    Raises:
        RunError: when it cannot be written.
    """
    page = render(results, name, question)
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, page)


def draw_figures(results: SweepResults, name: str) -> dict[str, go.Figure]:
    """Draw every figure of a sweep, with title and stamp, by name."""
    found = {}
    for key, findings in results.findings.items():
        for finding in findings:
            fig = finding.draw()
            if fig is not None:
                found[key] = add_title(fig, finding.describe().title, name)
    return found

"""Figures that a user asks for with --figure."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lab.cli.messages import refuse, report_failures, report_usage_errors
from lab.cli.output import check_output

if TYPE_CHECKING:
    import plotly.graph_objects as go


def make_figure_option(what: str, panel: str | None = None) -> Any:
    """Return the option --figure, which saves what it shows as a file."""
    return typer.Option(
        help=f"Save {what} as this .html, .png or .svg file.", rich_help_panel=panel
    )


def check_figure(figure: Path, force: bool) -> None:
    """Check that a figure may be saved as this file.

    Raises:
        ValueError: for another kind of file, or one that the lab did not make, unless forced.
    """
    from analysis.pages.export import SUFFIXES

    if figure.suffix.lower() not in SUFFIXES:
        raise ValueError(f"figure={figure}: must end in {', '.join(SUFFIXES)}")
    check_output("figure", figure, force)


def save_figure(fig: "go.Figure", figure: Path) -> None:
    """Save a figure; a file that cannot be written, or drawn without Chromium, is one line."""
    from analysis.pages.export import BrowserError, save
    from lab.files import explain_write_errors

    try:
        with report_failures(), report_usage_errors(), explain_write_errors(figure):
            save(fig, figure)
    except BrowserError as error:
        raise refuse(error, 2) from error

"""Run the notebooks whose cells have changed and keep what they show: `make gallery`.

A figure is kept as a PNG, which GitHub shows, and not as plotly's JSON, which it does not.
"""

import base64
import hashlib
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import plotly.graph_objects as go
from pictures import shrink

from analysis.figures.theme import HEAD
from analysis.pages.export import save_all

HOME = Path(__file__).parents[2] / "notebooks"
FIGURE, PICTURE = "application/vnd.plotly.v1+json", "image/png"
SCALE = 1.5
"""Pixels of a picture per pixel of a figure."""

nbformat = import_module("nbformat")


def main() -> None:
    """Run the notebooks that are not up to date."""
    for path in sorted(HOME.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        if notebook.metadata.get("ran") != digest(notebook):
            print(path.name, flush=True)
            run(notebook)
        figures = list_figures(notebook)
        if figures:
            replace_by_pictures(figures)
            nbformat.write(notebook, path)


def digest(notebook: Any) -> str:
    """Return eight hexadecimal digits of a notebook's code."""
    code = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()[:8]


def run(notebook: Any) -> None:
    """Run a notebook from top to bottom, in its own folder."""
    client = import_module("nbclient").NotebookClient(
        notebook,
        timeout=None,
        record_timing=False,
        coalesce_streams=True,  # else what is printed comes in parts, by chance
        kernel_name="python3",
        resources={"metadata": {"path": str(HOME)}},
    )
    client.execute()
    notebook.metadata["ran"] = digest(notebook)


def list_figures(notebook: Any) -> list[Any]:
    """Return the outputs of a notebook that are figures."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [output for cell in cells for output in cell.outputs if FIGURE in output.get("data", {})]


def replace_by_pictures(outputs: list[Any]) -> None:
    """Draw outputs that are figures, and keep the pictures alone."""
    with TemporaryDirectory() as folder:
        figures = {
            Path(folder, f"{i}.png"): read_figure(output.data[FIGURE])
            for i, output in enumerate(outputs)
        }
        save_all(figures, scale=SCALE)
        for output, (path, figure) in zip(outputs, figures.items(), strict=True):
            shrink(path)
            output.data = {PICTURE: base64.b64encode(path.read_bytes()).decode()}
            output.metadata = {PICTURE: {"width": figure.layout.width}}


def read_figure(content: dict[str, Any]) -> go.Figure:
    """Return a figure; one of the lab's is without the empty room for a title."""
    figure = go.Figure(data=content["data"], layout=content["layout"])
    layout = figure.layout
    top = layout.margin.t or layout.template.layout.margin.t
    if None in (top, layout.height):
        return figure
    return figure.update_layout(height=layout.height - HEAD, margin_t=top - HEAD)


if __name__ == "__main__":
    sys.exit(main())
